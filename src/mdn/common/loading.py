"""Load a model and its tokenizer from what a user names: a model directory, a run folder or a Hub id.

    model, tokenizer = load("runs/demo")        # a run folder means the model that the run has left in it

Whatever is wrong with the files is a ValueError that names them. Nothing is loaded in part: a tensor that is missing,
has another shape or holds NaN is an error, not a random initial value.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import itertools
import os
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mdn.common.errors import one_line
from mdn.common.files import read_json


def resolve_model(source: str | Path) -> str:
    """The directory (or Hub id) to load: a run folder means its `model/`; refuses what can be neither.

    The network is not accessed. An unfinished run is refused with what to do about it.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        for candidate in (path, path / "model"):
            if (candidate / "config.json").is_file():
                return str(candidate)
        raise ValueError(_why_no_model(path))
    owner = path.parts[0] if path.parts else ""
    # "runs" is where `mdn train` writes; it is not a Hub account.
    looks_local = len(path.parts) != 2 or str(source).startswith((".", "/", "~")) or owner == "runs"
    if path.exists() or looks_local or Path(owner).exists():
        raise ValueError(f"{str(source)!r} is neither a model directory, a run folder nor a Hub id (owner/name)")
    return str(source)


def _why_no_model(path: Path) -> str:
    """What a directory without a model is, and what its owner can do."""
    if not (path / "recipe.yaml").is_file():
        return f"{path} is neither a model directory (it has no config.json) nor the folder of a training run"
    steps = [int(found[1]) for p in path.glob("checkpoint-*") if (found := re.fullmatch(r"checkpoint-(\d+)", p.name))]
    finish = f"`mdn train {path}` finishes it"
    if not steps:
        return f"{path} is an unfinished training run without a checkpoint; {finish}"
    newest = path / f"checkpoint-{max(steps)}"
    return f"{path} is an unfinished training run, stopped after step {max(steps)}; {finish}, or use {newest} as it is"


def choose_device(name: str) -> str:
    """`auto` or the name of a device on which tensors can be computed here; else a ValueError."""
    import torch

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.zeros(1, device=name).item()  # meta and missing devices fail here at the latest
    except (RuntimeError, AssertionError, NotImplementedError, ImportError, ValueError) as error:
        raise ValueError(f"device {name!r} cannot be used here: {one_line(error, 160)}") from None
    return name


def load(
    source: str | Path, dtype: str = "auto", device: str = "auto", weight_format: str | None = None
) -> tuple[Any, Any]:
    """The model in evaluation mode, and its tokenizer; ``weight_format`` packs weights that are not stored packed."""
    device = choose_device(device)
    model = load_model(source, dtype)
    if weight_format is not None and model.config.weight_format != weight_format:
        model.quantize(weight_format)
    return model.to(device), load_tokenizer(source)


def load_model(source: str | Path, dtype: str = "auto") -> Any:
    """The model in evaluation mode, on the CPU."""
    from transformers import AutoModelForCausalLM

    import mdn.models  # noqa: F401  (registers the architecture with the Auto classes)

    place = resolve_model(source)
    import_plugins_of_environment()
    with _naming(source), _quiet():
        if Path(place).is_dir():
            read_json(Path(place) / "config.json")
        # Mismatched sizes are let through to be refused below, by name.
        found: Any = AutoModelForCausalLM.from_pretrained(
            place, dtype=dtype, output_loading_info=True, ignore_mismatched_sizes=True
        )
        model, report = found
        if report["missing_keys"] or report["mismatched_keys"]:
            mismatched = (key if isinstance(key, str) else key[0] for key in report["mismatched_keys"])
            names = sorted((*report["missing_keys"], *mismatched))
            raise ValueError(f"{len(names)} tensors are missing or do not fit the config, first {names[0]}")
        if report["unexpected_keys"]:
            names = sorted(report["unexpected_keys"])
            print(
                f"note: {place} holds {len(names)} tensors that the model has no use for, first {names[0]}",
                file=sys.stderr,
            )
    refuse_non_finite(model, place)
    return model.eval()


def load_tokenizer(source: str | Path) -> Any:
    from transformers import AutoTokenizer

    place = resolve_model(source)
    with _naming(f"the tokenizer of {source}"):
        return AutoTokenizer.from_pretrained(place)


def start_token(model: Any, tokenizer: Any) -> int | None:
    """The id that comes before a text, as it did in training; None if there is none.

    The model's, where it is the tokenizer's start or end of text: `mdn train` begins texts with the end-of-text id
    whatever the tokenizer's start token is. Else the tokenizer's, because many configs name an id that training has
    never used (the authors' name 1, with GPT-2's vocabulary).
    """
    named = model.generation_config.bos_token_id
    known = named is not None and named in (tokenizer.bos_token_id, tokenizer.eos_token_id)
    return named if known else tokenizer.bos_token_id


def prompt_ids(model: Any, tokenizer: Any, text: str) -> list[int]:
    """The ids of a text that ``model`` is to continue: the start token, if there is one, and those of the text."""
    start, ids = start_token(model, tokenizer), tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids if start is None else [start, *ids]


def refuse_non_finite(model: Any, place: str | Path) -> None:
    """A ValueError that names the first parameter with a NaN or an infinity in it."""
    import torch

    from mdn.layers.linear import Packed

    packed = ((f"{name}.weight", module.weight) for name, module in model.named_modules() if isinstance(module, Packed))
    for name, weights in itertools.chain(model.named_parameters(), packed):
        if not bool(torch.isfinite(weights).all()):
            raise ValueError(f"{place}: the weights {name} hold NaN or infinity; the model cannot be used")


def import_plugins_of_environment() -> None:
    """Those that MDN_PLUGINS lists, separated like paths."""
    import_plugins(filter(None, os.environ.get("MDN_PLUGINS", "").split(os.pathsep)))


def import_plugins(plugins: Iterable[str]) -> None:
    """Import a user's modules, which register mixers or corpora: each a file `.../name.py` or the name of a module."""
    for plugin in plugins:
        is_file = plugin.endswith(".py") or os.sep in plugin
        name = _plugin_module_name(plugin) if is_file else plugin
        if name in sys.modules:
            continue
        try:
            if not is_file:
                importlib.import_module(name)
                continue
            spec = importlib.util.spec_from_file_location(name, Path(plugin).expanduser())
            if spec is None or spec.loader is None:
                raise ImportError("expected a .py file or the name of a module")
            sys.modules[name] = module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        except Exception as error:
            sys.modules.pop(name, None)
            raise ValueError(
                f"plugin {plugin!r} cannot be imported: {type(error).__name__}: {one_line(error)}"
            ) from error


def _plugin_module_name(file: str) -> str:
    """Files of the same name in different folders are different modules; two paths to one file are the same one."""
    path = Path(file).expanduser().resolve()
    return f"mdn_plugin_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"


@contextmanager
def _naming(source: str | Path) -> Iterator[None]:
    """Errors while a user's files are read name those files."""
    try:
        yield
    except Exception as error:
        kind = "" if isinstance(error, ValueError | OSError) else f"{type(error).__name__}: "
        raise ValueError(f"cannot load {str(source)!r}: {kind}{one_line(error)}") from error


@contextmanager
def _quiet() -> Iterator[None]:
    """No bar for loading weights, and no report that the error above repeats."""
    from transformers.utils import logging

    shown, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if shown:
            logging.enable_progress_bar()
