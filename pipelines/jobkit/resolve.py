"""From a YAML file and a command line to one validated configuration, or one sentence saying what is wrong.

Later wins: the class's defaults, then the file, then the command line. Every complaint names the key, the value, where
the value was written, and the rule it breaks.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from model.errors import UserError
from pipelines.jobkit.keys import Key, list_keys, section_paths, section_type, suggest
from pipelines.jobkit.sections import JobConfig

ConfigT = TypeVar("ConfigT", bound=BaseModel)

SHOWN = 200  # characters of a wrong value
RULES = {
    "int_parsing": "it must be a whole number",
    "int_type": "it must be a whole number",
    "int_from_float": "it must be a whole number",
    "float_parsing": "it must be a number",
    "float_type": "it must be a number",
    "finite_number": "it must be a finite number",
    "too_short": "it must have at least {min_length} value",
    "int_parsing_size": "it is too large",
    "bool_parsing": "it must be true or false",
    "bool_type": "it must be true or false",
    "string_type": "it must be text",
    "tuple_type": "it must be a list",
    "list_type": "it must be a list",
    "literal_error": "it must be {expected}",
    "greater_than": "it must be above {gt}",
    "greater_than_equal": "it must be at least {ge}",
    "less_than": "it must be below {lt}",
    "less_than_equal": "it must be at most {le}",
    "multiple_of": "it must be a multiple of {multiple_of}",
    "model_type": "it must be a section with keys of its own",
}


@dataclass
class Settings:
    """Raw values by dotted key, and where each was written."""

    values: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)

    def put(self, path: str, value: Any, source: str) -> None:
        self.values[path] = value
        self.sources[path] = source


class _StrictLoader(yaml.SafeLoader):
    """YAML that refuses a key written twice in one mapping instead of silently keeping the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, (str, int, float, bool)) and key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} is written twice", key_node.start_mark
                )
            if isinstance(key, (str, int, float, bool)):
                seen.add(key)
        return super().construct_mapping(node, deep)


def read_yaml(path: str) -> dict[str, Any]:
    """The mapping in a YAML file; an empty file is an empty mapping. Raises UserError naming file, line and column."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"The config file {path} does not exist.") from None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UserError(f"The config file {path} cannot be read: {reason}.") from None
    try:
        content = yaml.load(text, Loader=_StrictLoader)
    except yaml.YAMLError as error:
        raise UserError(f"The config file {path} is not valid YAML: {_yaml_problem(error)}.") from None
    except RecursionError:
        raise UserError(f"The config file {path} is nested too deeply to be one of a job.") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise UserError(f"The config file {path} must hold keys and values, not {type(content).__name__}.")
    return content


def _yaml_problem(error: yaml.YAMLError) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f"line {mark.line + 1}, column {mark.column + 1}: {error.problem}"
    return " ".join(str(error).split())


def settings_of_file(path: str, config_type: type[BaseModel]) -> Settings:
    """Flatten a YAML file into dotted keys; unknown keys are refused, naming the nearest real one."""
    settings = Settings()
    sections = dict(section_paths(config_type))
    known = {key.path: key for key in list_keys(config_type)}

    def walk(mapping: Mapping[Any, Any], prefix: str) -> None:
        for name, value in mapping.items():
            key = f"{prefix}{name}"
            if key in sections and isinstance(value, dict):
                walk(value, f"{key}.")
            elif key in sections or key in known:
                alone = key in known and known[key].many and isinstance(value, str)
                settings.put(key, [value] if alone else value, f"in {path}")
            else:
                raise UserError(f"The config file {path} has the unknown key {key}: {suggest(key, list(known))}")

    walk(read_yaml(path), "")
    return settings


def text_value(key: Key, text: str) -> Any:
    """One command-line word as a raw value: null and booleans by the key's type, everything else stays text."""
    if text == "null" and key.optional:
        return None
    if bool in key.item_kinds and text in ("true", "false"):
        return text == "true"
    return text


def settings_of_words(words: Mapping[str, Sequence[str]], config_type: type[BaseModel]) -> Settings:
    """Typed raw values of `--key word...` pairs. A key that takes one value keeps the last occurrence's."""
    settings = Settings()
    sections = {path for path, _ in section_paths(config_type)}
    known = {key.path: key for key in list_keys(config_type)}
    for name, texts in words.items():
        if name in sections and name not in known and list(texts) != ["null"]:
            inner = [path for path in known if path.startswith(f"{name}.")]
            raise UserError(f"--{name} is a section: set its keys, such as --{inner[0]}.")
        if name not in known and name not in sections:
            raise UserError(f"--{name} is not a key of this job: {suggest(name, list(known), '--')}")
        if name in sections:
            settings.put(name, None, "on the command line")
            continue
        key = known[name]
        if not texts:
            raise UserError(f"--{name} needs a value ({key.type_name}).")
        value = _many(key, texts) if key.many else text_value(key, texts[-1])
        settings.put(name, value, "on the command line")
    return settings


def _many(key: Key, texts: Sequence[str]) -> list[Any] | None:
    if list(texts) == ["null"] and key.optional:
        return None
    return [text_value(key, text) for text in texts]


def _nested(settings: Settings) -> dict[str, Any]:
    root: dict[str, Any] = {}
    for path, value in sorted(settings.values.items(), key=lambda item: item[0].count(".")):
        *parents, leaf = path.split(".")
        place = root
        for parent in parents:
            if not isinstance(place.get(parent), dict):
                place[parent] = {}
            place = place[parent]
        place[leaf] = value
    return root


def _over_defaults(config_type: type[BaseModel], given: dict[str, Any]) -> dict[str, Any]:
    """Sections set in part keep what the class's default instance of them holds."""
    filled = dict(given)
    for name, field_info in config_type.model_fields.items():
        inner = section_type(field_info.annotation)
        if inner is not None and isinstance(given.get(name), dict):
            default = field_info.get_default(call_default_factory=True)
            held = dict(default) if isinstance(default, BaseModel) else {}
            filled[name] = {**held, **_over_defaults(inner, given[name])}
    return filled


def _refuse_misplaced_booleans(settings: Settings, known: Mapping[str, Key]) -> None:
    for path, value in settings.values.items():
        if path in known and isinstance(value, bool) and bool not in known[path].item_kinds:
            word = str(value).lower()
            raise UserError(f"{path} is {word} ({settings.sources[path]}): it must be {known[path].type_name}.")


def _sentence(error: ValidationError, settings: Settings, known: Mapping[str, Key]) -> str:
    """The first problem in words; further ones only counted."""
    problems: dict[str, list[Any]] = {}
    for detail in error.errors():
        problems.setdefault(_path_of(detail["loc"], known), []).append(detail)
    path, details = next(iter(problems.items()))
    rules = [_rule(detail) for detail in details]
    more = f" ({len(problems) - 1} more keys are wrong.)" if len(problems) > 1 else ""
    if details[0]["type"] == "missing":
        return f"{path} is required: give --{path}, or write it in a config file.{more}"
    if path not in known and path not in settings.sources:
        return f"{path + ': ' if path else ''}{rules[0]}.{more}"
    source = settings.sources.get(path, "by default")
    return f"{path} is {_shown(details[0]['input'])} ({source}): {', or '.join(dict.fromkeys(rules))}.{more}"


def _shown(value: Any) -> str:
    """A value as it was written: numbers bare although a command line gives text; of a long one the beginning."""
    try:
        float(value)
        text = str(value)
    except (TypeError, ValueError, OverflowError):
        text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def _path_of(location: tuple[int | str, ...], known: Mapping[str, Key]) -> str:
    """The dotted key of an error's location: its longest beginning that is a key, else the names in it."""
    for end in range(len(location), 0, -1):
        path = ".".join(str(part) for part in location[:end])
        if path in known:
            return path
    return ".".join(str(part) for part in location if isinstance(part, str))


def _rule(detail: Any) -> str:
    context = detail.get("ctx", {})
    if detail["type"] in ("value_error", "assertion_error"):
        return str(context["error"])
    template = RULES.get(detail["type"])
    return template.format(**context) if template else str(detail["msg"])


def build(config_type: type[ConfigT], *layers: Settings) -> ConfigT:
    """Merge the layers (later wins) over the class's defaults and validate. Raises UserError."""
    merged = Settings()
    for layer in layers:
        for path, value in layer.values.items():
            for inner in [old for old in merged.values if old.startswith(f"{path}.")]:
                del merged.values[inner]
            merged.put(path, value, layer.sources[path])
    known = {key.path: key for key in list_keys(config_type)}
    _refuse_misplaced_booleans(merged, known)
    try:
        return config_type.model_validate(_over_defaults(config_type, _nested(merged)))
    except ValidationError as error:
        raise UserError(_sentence(error, merged, known)) from None


def absolute_if_local(source: str) -> str:
    """A path that exists here, or a glob, as an absolute one; a URI or a Hub id stays as it is."""
    path = os.path.expanduser(source)
    if "://" in source or not (os.path.exists(path) or any(mark in path for mark in "*?[")):
        return source
    return os.path.abspath(path)


def default_output(job: str, name: str = "") -> str:
    """Where a job writes when nothing says otherwise: under BLOCKCAST_STORAGE, else ./out."""
    root = os.environ.get("BLOCKCAST_STORAGE") or "out"
    return f"{root.rstrip('/')}/{name or job}"


def settle_places(config: JobConfig, job: str) -> JobConfig:
    """Fill in the default output and make local paths absolute: workers run in other directories."""
    kind = type(config)
    output = config.output or (default_output(job, kind.output_name) if kind.writes_by_default else None)
    if output is not None and "://" not in output:
        output = os.path.abspath(os.path.expanduser(output))
    return config.model_copy(
        update={
            "output": output,
            "model": config.model and absolute_if_local(config.model),
            "data": tuple(absolute_if_local(source) for source in config.data),
        }
    )
