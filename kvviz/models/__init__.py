"""What can be loaded, from where, onto which device.

A name is the default model, a Hugging Face id, a local folder, or a `.gguf` file. Whatever it is, it ends as a folder
of safetensors, and only models that kvviz evicts correctly are loaded: the others are refused, with the reason.

    names.py      a name -> a folder on this machine; which names are allowed
    families.py   which architectures are supported, and why the others are not
    gguf.py       a GGUF file -> a folder of safetensors, once, in the cache
    yarn.py       a name with :yarn=4 after it -> four times as many positions
    vocabulary.py a GGUF file's own vocabulary and merges -> a tokenizer
    packed.py     linear layers that decode faster on a CPU
    load.py       the folder -> the model, its tokenizer and its dimensions
"""

from kvviz.models.errors import ModelError
from kvviz.models.families import supported_families
from kvviz.models.load import Loaded, load_model
from kvviz.models.names import DEFAULT, available, default_name

__all__ = ["DEFAULT", "Loaded", "ModelError", "available", "default_name", "load_model", "supported_families"]
