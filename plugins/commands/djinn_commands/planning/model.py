"""Models for `djinn explain` and `djinn plan`: built on the meta device from a configuration or by a function, and captured."""

from __future__ import annotations

import copy
import importlib
import inspect
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

import attrs
import click
import torch
from torch.utils import _pytree as pytree

import djinn
from djinn import DjinnError
from djinn.errors import ConfigurationError, UnsupportedOperation
from djinn.planning import PipelineResult

if TYPE_CHECKING:
    from djinn_profiler.captured import Captured

T = TypeVar("T")
Inputs = tuple[tuple[Any, ...], dict[str, Any]]
_SECOND = 16_000  # audio samples per second
_IMAGE = 224


@attrs.frozen
class Step:
    """The work of a model, with its input sizes.

    Attributes:
        kind: `forward` is one call, `decode` one token after a prompt, `train` one step of the optimizer.
        batch: number of inputs.
        tokens: tokens per input; for `decode`, tokens of the prompt.
        new_tokens: number of tokens decoded after the prompt.
        optimizer: name of a class of `torch.optim`, in any case, for `train`.
        dtype: dtype of weights and floating-point inputs, such as `bfloat16`. If empty, the model keeps its dtypes.
    """

    kind: Literal["forward", "decode", "train"] = "forward"
    batch: int = 1
    tokens: int = 512
    new_tokens: int = 1
    optimizer: str = "adamw"
    dtype: str = ""


def step_of(step: str, batch: int, tokens: int, **options: Any) -> Step:
    """Return the `Step` that the options of `djinn plan` and `djinn explain` describe."""
    return Step(cast("Any", step), batch, tokens, **options)


@attrs.frozen
class BuiltModel:
    """A model without weights.

    Attributes:
        target: the user's name of the model: a configuration file, its folder, or `module:function`.
        model: the model on the meta device.
        own_inputs: inputs that the user's function returned, or None to create inputs for each step.
        mend: advice to the user if a call of the model fails.
    """

    target: str
    model: torch.nn.Module
    own_inputs: Inputs | None
    mend: str

    @property
    def name(self) -> str:
        """Return the name of the model's class."""
        return type(self.model).__name__

    @property
    def parameters(self) -> int:
        """Return the number of the model's parameters."""
        return sum(p.numel() for p in self.model.parameters())

    def captured(self, step: Step, *, passes: int = 1) -> dict[str, Captured]:
        """Return the programs of a step by name: `forward`, or `prompt` and `decode`, or `train`.

        Args:
            step: the work to capture.
            passes: number of calls to capture. Values that one call keeps are inputs of the next call.

        Raises:
            ConfigurationError: a call of the model fails or depends on computed values, or its inputs are unknown.
        """
        model = self._model_for(step)
        inputs = self.own_inputs or ((), _inputs_for(model, step, self.mend))
        if step.dtype:
            inputs = pytree.tree_map_only(
                torch.Tensor, lambda t: t.to(_dtype(step)) if t.is_floating_point() else t, inputs
            )
        try:
            return self._called(lambda: _captured(model, step, lambda: inputs, passes))
        except (
            UnsupportedOperation
        ):  # the model reads its inputs: give them values, and let the executor compute the answers
            click.echo(f"{self.name} reads the values of its inputs: the plan assumes zeros", err=True)
        try:
            return self._called(
                lambda: _captured(model, step, lambda: pytree.tree_map_only(torch.Tensor, _zeros, inputs), passes)
            )
        except UnsupportedOperation as error:
            raise ConfigurationError(
                f"{self.target} cannot be planned without weights, because its control flow depends on computed values {_place(error)}: write "
                "a script that loads the weights and runs the model, and use `djinn explain script.py`"
            ) from None

    def _model_for(self, step: Step) -> torch.nn.Module:
        model = copy.deepcopy(self.model).to(_dtype(step)) if step.dtype else self.model
        return model.train(step.kind == "train")

    def _called(self, call: Callable[[], dict[str, Captured]]) -> dict[str, Captured]:
        return _called_model(self.target, self.mend, call)


def built_model(target: str, step: Step) -> BuiltModel:
    """Build the model that `target` names (a configuration or `module:function`). Print its name and size on stderr.

    Raises:
        ConfigurationError: the model cannot be built, or its inputs are unknown.
    """
    model = _built(target, step)
    model.model.to("meta")  # some models make tensors on the CPU despite the default device
    click.echo(f"{model.name}, {model.parameters:,} parameters, without weights", err=True)
    return model


def captured_model(target: str, step: Step, until: str) -> PipelineResult:
    """Return the plan of the last program of a model's step: for `decode`, the program of one token.

    Args:
        target: the model: a configuration file, its folder, or `module:function`.
        step: the work to plan.
        until: the last stage to run.

    Raises:
        ConfigurationError: the model cannot be built or called, or its inputs are unknown.
    """
    *_, last = built_model(target, step).captured(step).values()
    return djinn.plan(last, until=cast("Any", until))


def _dtype(step: Step) -> torch.dtype:
    dtype = getattr(torch, step.dtype, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ConfigurationError(
            f"--dtype {step.dtype}: PyTorch has no floating-point dtype of this name. Use bfloat16, float16 or float32"
        )
    return dtype


def _optimizer(step: Step, model: torch.nn.Module) -> torch.optim.Optimizer:
    optimizers = {
        name.lower(): optimizer_class
        for name, optimizer_class in vars(torch.optim).items()
        if isinstance(optimizer_class, type)
    }
    optimizer_class = optimizers.get(step.optimizer.lower())
    if (
        optimizer_class is None
        or not issubclass(optimizer_class, torch.optim.Optimizer)
        or optimizer_class is torch.optim.Optimizer
    ):
        names = sorted(n for n, f in optimizers.items() if issubclass(f, torch.optim.Optimizer) and n != "optimizer")
        raise ConfigurationError(
            f"--optimizer {step.optimizer}: torch.optim has no such class. Choose one of {', '.join(names)}"
        )
    if inspect.signature(optimizer_class.step).parameters["closure"].default is inspect.Parameter.empty:
        raise ConfigurationError(
            f"--optimizer {step.optimizer}: its step calls the model a variable number of times and cannot be planned. Choose another optimizer"
        )
    return optimizer_class(model.parameters())  # type: ignore[call-arg]


def _called_model(target: str, mend: str, call: Callable[[], T]) -> T:
    try:
        return call()
    except DjinnError:
        raise
    except Exception as error:
        _show(error)
        raise ConfigurationError(f"{target}: the call of the model failed with the traceback above. {mend}") from None


def _place(error: Exception) -> str:
    """Return the position of the model's code that raised the error, as words of a message."""
    ours = tuple(
        str(Path(place).parent) for place in (torch.__file__, djinn.__file__, __file__)
    )  # skips `djinn_core` as well as `djinn`
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(ours)]
    return f"at {frames[-1].filename}:{frames[-1].lineno} (`{frames[-1].line}`)" if frames else "inside PyTorch"


_OWN_INPUTS = "Write a function that returns the model and its inputs, as (model, {'name': tensor}), and name it as `module:function`"


def _captured(
    model: torch.nn.Module, step: Step, make_inputs: Callable[[], Inputs], passes: int
) -> dict[str, Captured]:
    """Return a step's programs by name. `make_inputs`: called in each capture. `passes`: calls, except for `decode`."""
    if step.kind == "decode":
        return _decoding(model, step, make_inputs)
    optimizer = _optimizer(step, model) if step.kind == "train" else None
    with djinn.capture() as capture, torch.set_grad_enabled(optimizer is not None):
        args, kwargs = make_inputs()
        for _ in range(passes):
            if optimizer is not None:
                optimizer.zero_grad()
            output = model(*args, **kwargs)  # the previous output lives until then, as in most loops
            if optimizer is not None:
                _loss(output).backward()
                optimizer.step()
    return {step.kind: capture}


def _zeros(tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros(tensor.shape, dtype=tensor.dtype)


def _loss(output: Any) -> torch.Tensor:
    """Return the model's loss, or the mean of the first output that depends on weights."""
    loss = getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss
    for leaf in pytree.tree_leaves(dict(output) if isinstance(output, Mapping) else output):
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
            return leaf.float().mean()
    raise ConfigurationError(
        "--step train: the model returns neither a loss nor a tensor that depends on its weights. Let it return one"
    )


def _decoding(model: torch.nn.Module, step: Step, make_inputs: Callable[[], Inputs]) -> dict[str, Captured]:
    """Return the program `prompt`, which reads the prompt, and `decode`, which decodes the last of the new tokens."""
    takes = inspect.signature(model.forward).parameters
    # As `generate()` calls it: only the last position is requested.
    options: dict[str, Any] = {"use_cache": True} | ({"logits_to_keep": 1} if "logits_to_keep" in takes else {})
    with torch.no_grad():
        with djinn.capture() as prompt:
            args, kwargs = make_inputs()
            tokens = kwargs.get("input_ids")
            if tokens is None or "past_key_values" not in takes:
                raise ConfigurationError(
                    f"--step decode: {type(model).__name__} does not take `input_ids` with `past_key_values`. Use --step forward"
                )
            output = model(*args, **kwargs, **options)
        with djinn.capture():  # only for its cache and the next token
            args, kwargs = make_inputs()
            longer = kwargs["input_ids"][:, :1].repeat(1, tokens.shape[1] + step.new_tokens - 1)
            output = model(*args, **kwargs | {"input_ids": longer}, **options)
            cache, token = output.past_key_values, longer[:, :1].clone()
            del output
        with djinn.capture() as decode:
            last = model(input_ids=token, past_key_values=cache, **options)
    del last  # frees memory that the program contains
    return {"prompt": prompt, "decode": decode}


def _built(target: str, step: Step) -> BuiltModel:
    """Build the model that `target` names, with the inputs that the user's function returned, if any."""
    path = Path(target)
    if path.is_dir() or path.suffix == ".json":
        model = _from_configuration(path / "config.json" if path.is_dir() else path)
        _inputs_for(model, step, _OWN_INPUTS)  # raises if the inputs are unknown
        return BuiltModel(target, model, None, _OWN_INPUTS)
    result = _called(_function(target), target)
    model, model_inputs = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
    if not isinstance(model, torch.nn.Module):
        raise ConfigurationError(
            f"{target} returned {type(model).__name__}: let it return a torch.nn.Module, or a tuple of a module and its inputs"
        )
    if model_inputs is None:
        mend = f"Let {target} also return the inputs: (model, {{'name': tensor}})"
        _inputs_for(model, step, mend)
        return BuiltModel(target, model, None, f"Its inputs were guessed. {mend}")
    inputs = _as_inputs(model_inputs)
    descriptions = [f"{name}={_type_label(value)}" for name, value in (*enumerate(inputs[0]), *inputs[1].items())]
    mend = f"Correct the model, or the inputs that {target} returns with it: {', '.join(descriptions) or 'none'}"
    return BuiltModel(target, model, inputs, mend)


def _type_label(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return type(value).__name__


def _as_inputs(value: Any) -> Inputs:
    on_meta = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to("meta"), value)
    if isinstance(on_meta, Mapping):
        return (), dict(on_meta)
    return (tuple(on_meta) if isinstance(on_meta, (list, tuple)) else (on_meta,)), {}


def _function(target: str) -> Callable[[], Any]:
    name, _, function = target.partition(":")
    if not all(part.isidentifier() for part in name.split(".")):
        raise _no_model(target)
    if not sys.flags.safe_path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        if not function:
            raise _no_model(target) from None
        raise ConfigurationError(
            f"the module {name!r} is neither installed nor in {Path.cwd()}: correct its name, or change to its folder"
        ) from None
    candidate = getattr(module, function, None)
    if not callable(candidate):
        names = [n for n, f in vars(module).items() if inspect.isfunction(f) and f.__module__ == module.__name__]
        raise ConfigurationError(
            f"the module {name} has no function {function!r}: choose one of its functions, {', '.join(sorted(names)) or 'none'}"
        )
    return cast("Callable[[], Any]", candidate)


def _no_model(target: str) -> ConfigurationError:
    return ConfigurationError(
        f"there is no model {target!r}: name the config.json of a Hugging Face model, its folder, or `module:function`. Names of models on the "
        "Hub do not work: download the model's config.json"
    )


def _called(function: Callable[[], Any], target: str) -> Any:
    try:
        with torch.device("meta"):
            return function()
    except Exception as error:
        _show(error)
        raise ConfigurationError(
            f"{target} raised {type(error).__name__} with the traceback above: correct the function"
        ) from None


def _show(error: Exception) -> None:
    click.echo("".join(traceback.format_exception(error)), err=True, nl=False)


def _from_configuration(file: Path) -> torch.nn.Module:
    """Return the model of a transformers configuration file.

    Raises:
        ConfigurationError: the file cannot be read, is for another library, or names an unknown model.
    """
    if not file.is_file():
        raise ConfigurationError(f"there is no file {file}: name the config.json of a model, or the folder with it")
    try:
        import transformers
    except ImportError:
        raise ConfigurationError(
            "models of a config.json need the package transformers, which is not installed: `pip install transformers`"
        ) from None
    try:
        config = transformers.AutoConfig.from_pretrained(str(file), local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigurationError(
            f"transformers {transformers.__version__} cannot read the configuration {file}: {reason.rstrip('.')}. Check the file, or update transformers"
        ) from None
    with torch.device("meta"):
        return _model_class(transformers, config)._from_config(config)  # type: ignore[no-any-return]  # noqa: SLF001


def _model_class(transformers: Any, config: Any) -> Any:
    """Return the class that the configuration names, or the class of the model without a head if it names none."""
    for name in config.architectures or ():
        model_class = getattr(transformers, name, None)
        if isinstance(model_class, type) and issubclass(model_class, transformers.PreTrainedModel):
            return model_class
    if config.architectures:
        raise ConfigurationError(
            f"transformers {transformers.__version__} has no model {config.architectures[0]!r}: update transformers. If the model's code is in "
            "its repository, write a function that returns the model, and name it as `module:function`"
        )
    return transformers.AutoModel._model_mapping[type(config)]  # noqa: SLF001 - what `AutoModel.from_config` looks in


def _inputs_for(model: torch.nn.Module, step: Step, mend: str) -> dict[str, Any]:
    """Create inputs for a transformers model, by the signature of its `forward` and its configuration.

    `mend`: advice to the user if the inputs are unknown.

    Raises:
        ConfigurationError: the inputs are unknown.
    """
    config, takes = getattr(model, "config", None), inspect.signature(model.forward).parameters
    main = str(getattr(model, "main_input_name", ""))
    with torch.device("meta"):
        inputs = {name: make(config, step) for name, make in _MAKERS.items() if name == main and name in takes}
        if _sees_and_reads(config) and {"input_ids", "pixel_values"} <= takes.keys():
            inputs = {name: _MAKERS[name](config, step) for name in ("input_ids", "pixel_values")}
        if inputs and getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in takes:
            inputs["decoder_input_ids"] = torch.zeros(step.batch, min(step.tokens, 64), dtype=torch.long)
    if not inputs:
        raise ConfigurationError(f"the inputs of {type(model).__name__} are unknown. {mend}")
    if step.kind == "train" and "labels" in takes and "LM" in type(model).__name__ and "input_ids" in inputs:
        inputs["labels"] = inputs.get("decoder_input_ids", inputs["input_ids"])
    return inputs


def _sees_and_reads(config: Any) -> bool:
    """Return True if the model has separate encoders for text and images, and does not read images as tokens."""
    both = getattr(config, "text_config", None) is not None and getattr(config, "vision_config", None) is not None
    return both and not any(getattr(config, name, None) for name in ("image_token_id", "image_token_index"))


def _tokens(config: Any, step: Step) -> torch.Tensor:
    text = getattr(config, "text_config", None) or config
    most = getattr(text, "max_position_embeddings", None) or step.tokens
    return torch.zeros(step.batch, min(step.tokens, most), dtype=torch.long)


def _pixels(config: Any, step: Step) -> torch.Tensor:
    vision = getattr(config, "vision_config", None) or config
    side = getattr(vision, "image_size", None) or _IMAGE
    height, width = side if isinstance(side, (list, tuple)) else (side, side)
    frames = (getattr(vision, "num_frames", None),) if getattr(vision, "num_frames", None) else ()
    return torch.zeros(step.batch, *frames, getattr(vision, "num_channels", 3), height, width)


def _waves(config: Any, step: Step) -> torch.Tensor:
    if getattr(config, "num_mel_bins", None) and getattr(config, "max_length", None):  # a spectrogram
        return torch.zeros(step.batch, config.max_length, config.num_mel_bins)
    return torch.zeros(step.batch, _SECOND)


def _features(config: Any, step: Step) -> torch.Tensor:
    bins = getattr(config, "num_mel_bins", None) or getattr(config, "feature_projection_input_dim", None) or 80
    positions = getattr(config, "max_source_positions", None)
    return torch.zeros(step.batch, bins, 2 * positions) if positions else torch.zeros(step.batch, step.tokens, bins)


_MAKERS: dict[str, Callable[[Any, Step], torch.Tensor]] = {
    "input_ids": _tokens,
    "pixel_values": _pixels,
    "input_values": _waves,
    "input_features": _features,
}
