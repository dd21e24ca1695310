"""kvviz: a dashboard in which a language model forgets. Run it with `make run`."""

import ui

with ui.frame() as page:
    page.run()
