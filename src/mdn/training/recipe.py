"""Reading recipes: find the file, apply `key=value` overrides, validate, and say clearly what is wrong.

recipe = load_recipe("demo", ["training.steps=20", "model.mixer=gated_deltanet"])
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from mdn.common.errors import nearest
from mdn.training.schema import Recipe

PACKAGED = Path(__file__).resolve().parent.parent / "recipes"

# Overrides below these keys do not change what is learnt, so they do not change the name of the run either.
_KEYS_THAT_KEEP_THE_NAME = (
    "output",
    "name",
    "description",
    "logging.",
    "distributed.",
    "sample.",
    "data.cache_dir",
    "data.workers",
)


def packaged_recipes() -> list[str]:
    """Names of the recipes in the package, as `mdn train NAME` takes them."""
    names = (path.relative_to(PACKAGED).with_suffix("").as_posix() for path in PACKAGED.rglob("*.yaml"))
    # mqar/ belongs to `mdn mqar`; a leading underscore marks what other recipes extend
    return sorted(name for name in names if not name.startswith("mqar/") and not Path(name).name.startswith("_"))


def find_recipe(name: str | Path) -> Path:
    """A path to a recipe from a path, or from the name of a packaged one (with or without `recipes/` and `.yaml`)."""
    path = Path(name)
    if path.is_file():
        return path
    short = re.sub(r"^(\./)?recipes/", "", path.as_posix())
    short = re.sub(r"\.ya?ml$", "", short)
    packaged = PACKAGED / f"{short}.yaml"
    if packaged.is_file():
        return packaged
    known = packaged_recipes()
    raise ValueError(
        f"no recipe {str(name)!r}: neither a file nor a packaged recipe{nearest(short, known)}; "
        f"packaged: {', '.join(known)}"
    )


def read_yaml(path: Path) -> dict[str, Any]:
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"recipe {path} is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise ValueError(f"recipe {path} must be a mapping of blocks, got {type(content).__name__}")
    return content


def read_recipe(path: Path, seen: tuple[Path, ...] = ()) -> dict[str, Any]:
    """The file's content over that of the recipe it `extends` (a name, or a path from the file's own folder)."""
    if path in seen:
        raise ValueError(f"recipe {path} extends itself: {' -> '.join(str(p) for p in (*seen, path))}")
    content = read_yaml(path)
    if "extends" not in content:
        return content
    name = str(content.pop("extends"))
    beside = path.parent / name
    return merge(read_recipe(beside if beside.is_file() else find_recipe(name), (*seen, path)), content)


def merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """`over` on top of `base`: blocks entry by entry, everything else replaced."""
    merged = dict(base)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = merge(merged[key], value) if both else value
    return merged


class _Loader(yaml.SafeLoader):
    """YAML 1.1 reads 3e-4 as text; people who write recipes mean the number."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:[0-9][0-9_]*)(?:\.[0-9_]*)?(?:[eE][-+]?[0-9]+)$|^[-+]?(?:[0-9][0-9_]*)\.[0-9_]*$"),
    list("-+0123456789"),
)


def apply_override(content: dict[str, Any], override: str) -> None:
    """Set one dotted key of the nested mapping in place; the value is read as YAML."""
    key, separator, text = override.partition("=")
    if not separator or not key.strip():
        raise ValueError(f"override {override!r} is not of the form key=value, for example training.steps=100")
    parts = key.strip().split(".")
    place = content
    for depth, part in enumerate(parts[:-1]):
        place = place.setdefault(part, {})
        if not isinstance(place, dict):
            raise ValueError(f"override {override!r}: {'.'.join(parts[: depth + 1])} is a value, not a block")
    try:
        place[parts[-1]] = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError:
        raise ValueError(f"override {override!r}: {text!r} is not a valid YAML value") from None


def load_recipe(name: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read, override and validate a recipe. A run with overrides gets its own directory, unless `output` is given."""
    path = find_recipe(name)
    content = read_recipe(path)
    for override in overrides:
        apply_override(content, override)
    recipe = validate(content, str(path))
    if overrides and recipe.output is None:
        recipe = recipe.model_copy(update={"output": str(Path("runs") / (recipe.name + _suffix(overrides)))})
    return recipe


def _suffix(overrides: Sequence[str]) -> str:
    """'-mixer=gated_deltanet' and the like: what was overridden, safe as part of a file name."""
    told = [o for o in overrides if not o.startswith(_KEYS_THAT_KEEP_THE_NAME)]
    short = [f"{key.strip().rsplit('.', 1)[-1]}={value.strip()}" for key, _, value in (o.partition("=") for o in told)]
    return "".join("-" + re.sub(r"[^\w.=,+-]+", "_", part) for part in short)[:120]


def validate(content: dict[str, Any], where: str) -> Recipe:
    try:
        return Recipe.model_validate(content)
    except ValidationError as error:
        lines = [_explain(detail) for detail in error.errors()]
        raise ValueError(f"recipe {where}: " + "; ".join(lines)) from None


def _explain(detail: Any) -> str:
    """One pydantic error as a phrase with the dotted key, what was given and what is expected."""
    location = [str(part) for part in detail["loc"]]
    key = ".".join(location)
    if detail["type"] == "extra_forbidden":
        return f"unknown key {key!r}{nearest(key, _known_keys())}"
    if detail["type"] == "missing":
        return f"key {key!r} is missing"
    if detail["type"] == "value_error":
        return str(detail["ctx"]["error"])
    return f"{key}: {detail['msg'][0].lower()}{detail['msg'][1:]}, got {detail['input']!r}"


def _known_keys() -> list[str]:
    """Every dotted key a recipe may have (the fields of the model block are checked against the model's config)."""

    def walk(block: type[BaseModel], prefix: str) -> Iterable[str]:
        for name, field in block.model_fields.items():
            kind = field.annotation
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from walk(kind, f"{prefix}{name}.")
            yield prefix + name

    return list(walk(Recipe, ""))


def to_yaml(recipe: Recipe) -> str:
    """The resolved recipe, every default written out; reading it back gives the same recipe."""
    return yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=120)
