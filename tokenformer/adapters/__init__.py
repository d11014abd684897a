"""Token adapters: fine-tune a TokenFormer by adding tokens to its layers, as a method of peft.

    from peft import get_peft_model
    adapted = get_peft_model(model, tokenformer.TokenAdapterConfig(num_tokens=32))

Importing this package registers the method with peft. `import tokenformer` does so as soon as peft
is imported (`models/registration.py`).
"""

from importlib.util import find_spec

if find_spec("peft") is None:
    raise ImportError("token adapters need peft; pip install 'tokenformer[peft]'")

from tokenformer.adapters.adapter_config import TokenAdapterConfig
from tokenformer.adapters.adapter_layer import TokenAdapterLayer
from tokenformer.adapters.adapter_model import TokenAdapterModel
from tokenformer.adapters.peft_registration import register

register(TokenAdapterConfig, TokenAdapterModel)

__all__ = ["TokenAdapterConfig", "TokenAdapterLayer", "TokenAdapterModel"]
