"""The commands of `python -m kvviz`: one module each, with HELP, add_arguments(parser) and run(options)."""
