"""Models in folders of the server: `from_pretrained("file:NAME")` also reads configuration and tokenizer from the server.

The folder's small files are copied to a local temporary folder, which transformers reads in place of the address.
"""

from __future__ import annotations

import atexit
import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from djinn_core.errors import ProtocolError
from djinn_core.wire.weight_messages import SmallFilesReply, SmallFilesRequest
from djinn_integrations.weights.open_weights import checked, query
from djinn_integrations.weights.server_files import address_in

_NAMES: Final = ("pretrained_model_name_or_path", "pretrained_model_name")  # names of the first argument
_folders: dict[str, str] = {}  # address by folder


def address_of(path: object) -> str | None:
    """Return the server address of a temporary folder that `local_folder` created, or None for other folders."""
    return _folders.get(str(path))


def local_folder(address: str) -> str:
    """Copy the small files of a server folder to a new local folder, and return the local folder's path.

    Raises:
        WeightsUnavailable: the server has no such folder, or may not read it.
        ProtocolError: the server sent the name of a file outside the folder.
    """
    reply = query(SmallFilesRequest(checked(address)), SmallFilesReply, 0)
    folder = tempfile.mkdtemp(dir=_temporary())
    for file in reply.files:
        if Path(file.name).name != file.name:
            raise ProtocolError(
                f"the server sent the file {file.name!r}, which is outside the folder {address!r}: the folder was not loaded"
            )
        Path(folder, file.name).write_bytes(file.content)
    _folders[folder] = address
    return folder


@functools.cache
def _temporary() -> str:
    """Return the path of a temporary folder, created at the first call and removed when the program ends."""
    folder = tempfile.TemporaryDirectory(prefix="djinn-models-")
    atexit.register(folder.cleanup)
    return folder.name


def _replaced(value: object) -> object:
    address = address_in(value)
    return value if address is None or Path(address).exists() else local_folder(address)


def _taking_addresses(method: Any) -> classmethod[Any, Any, Any]:
    plain: Callable[..., Any] = method.__func__

    @functools.wraps(plain)
    def taking(cls: Any, *args: Any, **options: Any) -> Any:
        if args:
            args = (_replaced(args[0]), *args[1:])
        else:
            options |= {name: _replaced(options[name]) for name in _NAMES if name in options}
        return plain(cls, *args, **options)

    return classmethod(taking)


def taking_addresses(*methods: tuple[str, str]) -> Callable[[Any], None]:
    """Return an adapter of a module that makes class methods accept a server address as their first argument.

    `methods`: names of class and method.
    """

    def adapt(module: Any) -> None:
        for owner, name in methods:
            owner_class = getattr(module, owner, None)
            if owner_class is not None:
                setattr(owner_class, name, _taking_addresses(owner_class.__dict__[name]))

    return adapt


FOLDER_READERS: Final = {
    "transformers.configuration_utils": (("PreTrainedConfig", "get_config_dict"),),
    "transformers.feature_extraction_utils": (("FeatureExtractionMixin", "get_feature_extractor_dict"),),
    "transformers.generation.configuration_utils": (("GenerationConfig", "from_pretrained"),),
    "transformers.image_processing_base": (("ImageProcessingMixin", "get_image_processor_dict"),),
    "transformers.modeling_utils": (("PreTrainedModel", "from_pretrained"),),
    "transformers.models.auto.auto_factory": (("_BaseAutoModelClass", "from_pretrained"),),
    "transformers.models.auto.tokenization_auto": (("AutoTokenizer", "from_pretrained"),),
    "transformers.processing_utils": (("ProcessorMixin", "get_processor_dict"),),
    "transformers.tokenization_utils_base": (("PreTrainedTokenizerBase", "from_pretrained"),),
}
"""Class methods by the module that has them."""
