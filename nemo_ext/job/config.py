"""Composition of configs with Hydra and our resolvers, and the entry point of every job. Does not import torch.

`nemo-ext JOB key=value` and `python launchers/JOB.py key=value` both call `run_job`, so `--help`, `--cfg job` and
`--config-dir` work the same everywhere. Errors are printed as one line on stderr. The exit code is 2 for a user error,
and 1 for a system error such as a full disk.
"""

import functools
import math
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any, NoReturn

import hydra
import yaml
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigIndexError, OmegaConfBaseException

from nemo_ext.job import bf16
from nemo_ext.job.help import help_text
from nemo_ext.job.interrupts import kept_interrupts
from nemo_ext.job.job import Grammar, JobFailed, invoke
from nemo_ext.job.keys import is_marked, is_place, may_be_new, names
from nemo_ext.job.registry import CONFIGS, config_packages, grammar_of, with_config
from nemo_ext.job.settings import REPLACED, TEXT, WORDS, nearest
from nemo_ext.job.words import did_you_mean

FAILED = 1
USER_ERROR = 2
INTERRUPTED = 130
FULL_ERROR = "HYDRA_FULL_ERROR"


def iterations(tokens: float | None, seq_length: int, global_batch_size: int) -> int | None:
    """Return the number of training steps that comes closest to `tokens` tokens; None if `tokens` is None.

    The result is 0 for 0 tokens, and otherwise at least 1.
    """
    if tokens is None:
        return None
    if not isinstance(tokens, int | float) or tokens < 0:
        raise ValueError(f"${{iterations:...}}: the number of tokens must be at least 0, not {tokens!r}")
    return max(1, round(float(tokens) / (seq_length * global_batch_size))) if tokens else 0


def add(*terms: float) -> float | int:
    """Return the sum of the terms, as an integer if it is whole."""
    total = math.fsum(map(_number, terms))
    return int(total) if total == int(total) else total


def multiply(*factors: float) -> float | int:
    """Return the product of the factors, as an integer if it is whole."""
    product = 1.0
    for factor in factors:
        product *= _number(factor)
    return int(product) if product == int(product) else product


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ValueError(f"${{add:...}} and ${{multiply:...}} require numbers, not {value!r}") from None


def register_resolvers() -> None:
    """Register the resolvers `iterations:tokens,seq_length,global_batch_size`, `add`, `multiply` and `bf16_is_fast`."""
    OmegaConf.register_new_resolver("add", add, replace=True)
    OmegaConf.register_new_resolver("bf16_is_fast", bf16.is_fast, replace=True)
    OmegaConf.register_new_resolver("iterations", iterations, replace=True)
    OmegaConf.register_new_resolver("multiply", multiply, replace=True)


def compose(config_name: str, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Compose and resolve a config, for use from Python.

    Args:
        config_name: name of a primary config, such as `train`.
        overrides: command line arguments, including `--config-dir`, such as
            `["recipe=olmo3/7b_pretrain", "megatron.lr=1e-4"]`.

    Raises:
        ValueError: a mandatory value is missing, an override is invalid, or a file cannot be read.
    """
    register_resolvers()
    folders, words = config_folders(overrides)
    package = _package_of(config_name)
    search = _search(package, folders)
    overrides = [*search, *hydra_words(words, config_name)]
    running, GlobalHydra.instance().hydra = GlobalHydra.instance().hydra, None  # set if a running job composes another
    try:
        with hydra.initialize_config_module(package, version_base="1.3"), _lists_are_whole(overrides):
            return resolved(hydra.compose(config_name, overrides=overrides), search)
    except (HydraException, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(mistake(error, config_name)) from error
    finally:
        GlobalHydra.instance().hydra = running


@contextmanager
def _lists_are_whole(overrides: Sequence[str]) -> Iterator[None]:
    """Raise ValueError, naming the override, when OmegaConf cannot set a named key inside a list."""
    try:
        yield
    except TypeError as error:
        if (index := re.fullmatch(r"Index '(.*)' \(str\) is not an int", str(error))) is None:
            raise
        keys = (word.partition("=")[0].lstrip("+~") for word in overrides)
        key = next((key for key in keys if index[1] in key.split(".")[1:]), index[1])
        section = key.partition(f".{index[1]}")[0]
        raise ValueError(
            f"{key}: {section} is a list, whose items have no names: set it as a whole, {section}=[...]"
        ) from error


def _package_of(config_name: str) -> str:
    """Name of the package that contains a primary config."""
    command = with_config(config_name)
    return command.configs if command else CONFIGS


def _search(package: str, folders: Sequence[Path] = ()) -> list[str]:
    """Return the overrides that extend Hydra's search path by `folders` and by all config packages but `package`."""
    places = [hydra_value(f"file://{folder}") for folder in folders]
    places += [f"pkg://{other}" for other in config_packages() if other != package]
    return [f"hydra.searchpath=[{','.join(places)}]"] if places else []


def config_folders(words: Sequence[str]) -> tuple[list[Path], list[str]]:
    """Split arguments into the folders given by `--config-dir DIR` (or `-cd DIR`), and the remaining arguments.

    Raises:
        ValueError: a folder does not exist.
    """
    folders: list[Path] = []
    rest: list[str] = []
    remaining = iter(words)
    for word in remaining:
        name, equals, value = word.partition("=")
        if name not in ("--config-dir", "-cd"):
            rest.append(word)
            continue
        folder = Path(value if equals else next(remaining, "")).expanduser().resolve()
        if not folder.is_dir():
            raise ValueError(f"{name}={folder}: no such folder; name a folder with config files")
        folders.append(folder)
    return folders, rest


def _own_data(config: Mapping[str, Any], streams: object) -> dict[str, Any]:
    """Return the section `data` with the recipe's data replaced by the user's `streams`, a flat list or a tree.

    The streams' files are in `data_root`, unless a stream has a prefix. The recipe's tokenizer, validation share, seed,
    workers and epoch limits are kept.
    """
    if (config.get("megatron") or {}).get("mock_data"):
        raise ValueError("streams and data=mock cannot be combined: remove one of them")
    data = config.get("data") or {}
    kept = ("tokenizer", "validation_share", "seed", "workers", "max_epochs", "refuse_epochs")
    section = {
        "directory": config["data_root"],
        "blend": None,
        "streams": None,
        **{key: data[key] for key in kept if data.get(key) is not None},
        "streams" if isinstance(streams, list) else "blend": streams,
    }
    if "phases" in config and "tokenizer" not in section:
        raise ValueError(
            "streams requires a tokenizer, and this recipe does not name one; add the tokenizer of the streams, such "
            "as 'data.tokenizer={kind: huggingface, path: FOLDER}'"
        )
    return section


def without_data(phases: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config's section `phases` without each phase's own data, so that all phases use the run's data."""
    return {
        name: {key: value for key, value in phase.items() if key != "data"} if isinstance(phase, dict) else phase
        for name, phase in phases.items()
    }


def _named_blend(key: str, name: str, config: Mapping[str, Any], search: Sequence[str]) -> Any:
    """Compose the section `data` of the file `name` in the config group `data`, which a phase names as its data.

    `key` is the phase's config key, for messages. The overrides `search` set Hydra's search path.
    """
    words = [*search, f"data={name}", f"data_root={hydra_value(str(config['data_root']))}"]
    try:
        return resolved(hydra.compose("tokenize", overrides=words))["data"]
    except MissingConfigException as error:
        line = str(error).splitlines()[0]
        raise ValueError(f"{key}={name}: not found in the config group data ({line}); name one of its files") from error
    except (HydraException, yaml.YAMLError) as error:
        raise ValueError(f"{key}={name} cannot be composed: {mistake(error, 'tokenize')}") from error


def resolved(config: DictConfig, search: Sequence[str] = ()) -> dict[str, Any]:
    """Resolve a config to plain containers, and turn `streams`, and blends that phases name, into sections `data`.

    Only call this while Hydra is initialised, so that files in --config-dir are found as well.

    Args:
        config: config composed by Hydra.
        search: overrides that set Hydra's search path, if Hydra was initialised without them.

    Raises:
        ValueError: mandatory values (`???`) are missing (names all of them), an interpolation cannot be resolved,
            `launcher` or `phases` is not a section, or `streams` or a named blend is invalid.
    """
    try:
        # Not OmegaConf.missing_keys, which fails on interpolations of missing values.
        if missing := sorted(_missing(OmegaConf.to_container(config, resolve=False))):
            raise ValueError(
                f"required keys are not set: {', '.join(missing)}; set them with key=value on the command line"
            )
        container = OmegaConf.to_container(config, resolve=True)
    except OmegaConfBaseException as error:
        why = re.sub(r"^\w+ raised while resolving interpolation: ", "", str(error).splitlines()[0])
        raise ValueError(f"{error.full_key} cannot be resolved: {why}; correct the ${{...}} in its value") from error
    assert isinstance(container, dict)
    values = {str(key): value for key, value in container.items()}
    for name, section in (("launcher", values.get("launcher", {})), ("phases", values.get("phases") or {})):
        if not isinstance(section, dict):
            raise ValueError(f"{name}={section!r}: expected a section with keys")
    phases = values.get("phases") or {}
    if (streams := values.pop("streams", None)) is not None:
        values["data"] = _own_data(values, streams)
        if phases:
            values["phases"] = phases = without_data(phases)
    for name, phase in phases.items():
        if isinstance(phase, dict) and isinstance(phase.get("data"), str):
            phase["data"] = _named_blend(f"phases.{name}.data", phase["data"], values, search)
    return values


def _missing(value: object, above: str = "") -> Iterator[str]:
    """Yield the dotted keys of values that are `???`; `above` is the key of `value` itself."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _missing(inner, f"{above}.{key}" if above else str(key))
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from _missing(inner, f"{above}[{number}]")
    elif value == "???":
        yield above


def hydra_words(words: Sequence[str], config_name: str = "") -> list[str]:
    """Translate command line arguments to Hydra's grammar, as specified by the `Grammar` of the config's command.

    Hydra only knows keys that are in config files, so other keys of a settings class or an open mapping are added with
    `++`. A section marked `REPLACED`, such as `puzzle.search.shares={parameters: 0.6}`, replaces the recipe's section;
    Hydra would merge the two. Text, names of files and folders, and `model.pattern`, whose braces are special in Hydra,
    are quoted.

    Raises:
        ValueError: both `streams` and `data.directory` are set, although streams are not read from that directory.
    """
    keys = {word.partition("=")[0] for word in words}
    if {"streams", "data.directory"} <= keys:
        raise ValueError(
            "data.directory applies only to the recipe's data; for streams, set data_root or a prefix per stream"
        )
    grammar, spelled = grammar_of(config_name), list[str]()
    for word in words:
        key, equals, value = word.partition("=")
        key = grammar.aliases.get(key, key)
        bare = key.lstrip("+~")
        marked = functools.partial(is_marked, grammar.settings, bare)
        if equals and not _is_plain(value) and _is_text(grammar, bare, value) and not marked(WORDS):
            value = hydra_value(value)
        word = f"{key}{equals}{value}"
        literal = invoke(grammar.literal, key, value) if equals and grammar.literal else None
        if literal is not None:
            spelled.append(f"++{key}={value if literal or _QUOTED.fullmatch(value) else hydra_value(value)}")
        elif word == "--dry-run" and grammar.dry_run:
            spelled.append(f"{grammar.dry_run}=true")
        elif key == "streams" and equals and grammar.streams:
            spelled += ["streams=null", word]
        elif key in grammar.groups:
            chosen = f"{grammar.groups[key]}={value}"
            spelled += [chosen, word] if key == "preset" else [chosen]
        elif key in grammar.added and equals and "recipe" not in {name.lstrip("+") for name in keys}:
            spelled.append(f"+{word}")
        elif key in grammar.replaces and equals and value != "null":
            # The replaced section may have mandatory settings that are no longer needed.
            spelled += [word, f"~{grammar.replaces[key]}"]
        elif key == "model.pattern" and value[:1] not in ("'", '"'):
            spelled.append(f'{key}="{value}"')
        elif equals and key == bare and marked(REPLACED):
            spelled += [f"++{key}=null", f"++{word}"]
        elif equals and value[:1] not in ("[", "$") and value not in ("", "null") and marked(WORDS):
            spelled.append(f"{key}=[{','.join(map(hydra_value, _split(key, value)))}]")
        else:
            if value not in ("", "null") and not _QUOTED.fullmatch(value) and marked(TEXT):
                word = f"{key}={hydra_value(value)}"
            section = value.startswith("{")
            new = bool(equals) and ("." in key or section) and may_be_new(grammar.settings, key)
            new |= key == "data.tokenizer" and section and grammar.streams  # a recipe may have a string here
            spelled.append(f"++{word}" if new else word)
    return spelled


def _split(key: str, text: str) -> list[str]:
    """Split a string into words as a shell would; raises ValueError if a quotation mark is not closed."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ValueError(
            f"{key}={text}: cannot be split into words ({error}); quote them as on a command line"
        ) from error


def _is_text(grammar: Grammar, key: str, value: str) -> bool:
    """Return whether a value, such as a file or folder name, must be quoted because Hydra would misinterpret it.

    False for lists, mappings, values with escapes, and values that are already quoted (one, or several in a sweep).
    """
    if value in ("", "null", "???") or "\\" in value or (value[0], value[-1]) in (("[", "]"), ("{", "}")):
        return False
    if re.fullmatch(rf"{_QUOTED.pattern}(,{_QUOTED.pattern.replace('1', '3')})*", value, re.DOTALL):
        return False
    return is_place(grammar.settings, key) or (grammar.loose and "." not in key and not _is_readable(value))


def _is_readable(value: str) -> bool:
    """True if Hydra's grammar parses the string as a single value."""
    try:
        return not OverridesParser.create().parse_override(f"key={value}").is_sweep_override()
    except HydraException:
        return False


_QUOTED = re.compile(r"""(["'])(?:\\.|(?!\1)[^\\])*\1""", re.DOTALL)
"""Pattern of a quoted string in Hydra's grammar."""


def _is_plain(text: str) -> bool:
    no_text = ("null", "true", "false", "inf", "nan")
    plain = re.fullmatch(r"(\.{0,2}/|[A-Za-z])[A-Za-z0-9_./-]*", text)
    return plain is not None and text.lower() not in no_text


def hydra_value(text: str) -> str:
    """Quote a string, unless it is a plain word or path, so that Hydra parses it literally as an override's value.

    Without quotes, a comma would start a sweep, and `1e5` would be a number. Interpolations (`${...}`) are preserved.
    """
    if _is_plain(text):
        return text
    # In quotes, only backslashes before a quote must be escaped.
    doubled = re.sub(r'(\\+)("|$)', r"\1\1\2", text)
    return '"' + doubled.replace('"', r"\"") + '"'


def check_place(key: str, place: object) -> None:
    """Reject the path `place` if it cannot be quoted in the arguments of jobs; `key` is its config key, for errors."""
    if wrong := {text for text in ("'", '"', "\\", "${") if text in str(place)}:
        characters = " ".join(sorted(wrong))
        raise ValueError(f"{key}={place}: choose a path without {characters}, which cannot be passed to other jobs")


def check_choice(group: str, words: Sequence[str], job: str = "") -> None:
    """Reject the choice of a missing config file, and suggest the nearest (Hydra lists only one folder level).

    Args:
        words: command line arguments.
        job: name of the job, which may have its own recipes; "" if there is none.

    Raises:
        ValueError: neither the package nor a folder of --config-dir has the file.
    """
    folders, words = config_folders(words)
    places = group_folders(grammar_of(job).groups.get(group, group), folders, job)
    known = _names(places)
    for word in words:
        name = word.removeprefix(f"{group}=").strip("\"'").removesuffix(".yaml")
        if word.startswith(f"{group}=") and not any((place / f"{name}.yaml").is_file() for place in places):
            raise ValueError(f"{group}={name}: no such {group}: {nearest(name, known)}")


def group_folders(group: str, folders: Sequence[Path], job: str = "") -> list[Path]:
    """Return the folders that may contain the files of a config group, whether or not they exist.

    Args:
        folders: folders of --config-dir.
        job: name of a job, whose package is searched in addition to those with config groups; "" for none.
    """
    packages = dict.fromkeys([*config_packages(), _package_of(job)])
    return [root / group for root in (*(Path(str(files(package))) for package in packages), *folders)]


def _names(places: Sequence[Path]) -> list[str]:
    """Return the sorted names of the config files in `places`: their paths relative to the folder, without suffix."""
    return sorted({str(file.relative_to(place).with_suffix("")) for place in places for file in place.rglob("*.yaml")})


def _help(config_name: str, words: Sequence[str]) -> str:
    """Return the text that `--help` prints for a job; of the arguments `words`, only --config-dir has an effect."""
    command, (folders, _) = with_config(config_name), config_folders(words)
    assert command is not None
    package = _package_of(config_name)
    with hydra.initialize_config_module(package, version_base="1.3"):
        config = hydra.compose(config_name, overrides=_search(package, folders), return_hydra_config=True)
    keys = {group: key for key, group in command.grammar.groups.items()}
    chosen = [group for group in config.hydra.runtime.choices if not group.startswith("hydra/")]
    groups = {keys.get(group, group): group for group in dict.fromkeys([*command.grammar.groups.values(), *chosen])}
    options = {key: _names(group_folders(group, folders, config_name)) for key, group in groups.items()}
    return help_text(command, config, options)


def mistake(error: Exception, job: str) -> str:
    """Turn an error of Hydra or YAML into a message that says why a job's config cannot be composed, and what to do."""
    owner = with_config(job)
    grammar, command = (owner.grammar, owner.name) if owner else (Grammar(), job)
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        place = f"{error.problem_mark.name}, line {error.problem_mark.line + 1}"
        return f"{place}: {error.problem}: correct the file, which must be plain YAML"
    if isinstance(error, UnicodeDecodeError):
        return f"a YAML file of this config is not UTF-8 ({error}): save it as UTF-8"
    if isinstance(error, MissingConfigException) and error.options and error.missing_cfg_file:
        folder, _, name = error.missing_cfg_file.rpartition("/")
        key = next((key for key, group in grammar.groups.items() if group == folder), folder)
        return f"{key}={name}: no such {key}: {nearest(name, error.options)}"
    unknown = re.match(r"Could not override '([^']+)'", str(error))
    if unknown and isinstance(error.__cause__, OmegaConfBaseException):
        why = str(error.__cause__).splitlines()[0]
        if "is not in struct" in why:
            key = unknown[1]
            why = grammar.advice.get(
                key, f"{command} has no such key; `nemo-ext {command} --help` lists its keys{_near(error, grammar)}"
            )
        return f"{unknown[0]}: {why}"
    if group := re.match(r"Could not override '([^']+)'\. No match in the defaults list", str(error)):
        return (
            f"{group[1]}: {command} has no such config group; if you meant a key, move the folder {group[1]} out of "
            "--config-dir, as it makes Hydra expect a config group"
        )
    if isinstance(error.__cause__, ConfigIndexError):
        section, _, item = str(error.__cause__.full_key).rstrip("]").rpartition("[")
        return f"{error}: {section} has no item {item}; set the list as a whole, {section}=[...]"
    return " ".join((str(error).strip() or str(error.__cause__ or error)).split())


def _near(error: Exception, grammar: Grammar) -> str:
    """Return a suggestion for an unknown key, such as `: did you mean 'lr'?`; "" if no key of its section is similar.

    The key and its section are read from the cause of Hydra's error.
    """
    cause: Any = error.__cause__
    known = [*map(str, cause.parent_node or ()), *names(grammar.settings, cause.full_key.rpartition(".")[0])]
    near = did_you_mean(str(cause.key), known)
    return f": {near}" if near else ""


@contextmanager
def full_errors() -> Iterator[Callable[[], None]]:
    """Make Hydra raise errors instead of printing them; yields a function that restores printing."""
    set_before = bool(os.environ.get(FULL_ERROR))
    if not set_before:
        os.environ[FULL_ERROR] = "1"

    def restore() -> None:
        if not set_before:
            os.environ.pop(FULL_ERROR, None)

    try:
        yield restore
    finally:
        restore()


@contextmanager
def mistakes_are_one_line() -> Iterator[None]:
    """Print a user error in the block as one line on stderr, and exit with code 2."""
    try:
        yield
    except (ValueError, HydraException) as error:
        _end(USER_ERROR, error)


def _end(code: int, error: object) -> NoReturn:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(code)


def run_job(config_name: str, job: Callable[[dict[str, Any]], None], *, resumable: bool = False) -> None:
    """Compose `config_name` with the overrides in `sys.argv`, and run `job` on the resolved config.

    Errors that the user can correct are printed as one line on stderr instead of a traceback. The exit code is 2 for a
    composition error or a ValueError, 1 for a system error such as a full disk, and 130 after Ctrl-C. After Ctrl-C in a
    `resumable` job, the last line says that the same command resumes.
    """
    register_resolvers()
    # Spinning threads would slow down other jobs on the machine; this is read when torch is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    with mistakes_are_one_line():
        if {"-h", "--help"} & set(sys.argv[1:]):
            try:
                print(_help(config_name, sys.argv[1:]), flush=True)
            except BrokenPipeError:
                _drop_output()
            return
        check_choice("recipe", sys.argv[1:], config_name)
        package = _package_of(config_name)
        words = hydra_words(sys.argv[1:], config_name)
        # Next to the first override, as argparse accepts only consecutive ones.
        first = next((number for number, word in enumerate(words) if "=" in word and word[0] != "-"), len(words))
        sys.argv = [sys.argv[0], *words[:first], *_search(package), *words[first:]]

    composed = False

    def guarded(config: DictConfig) -> None:
        nonlocal composed
        composed = True
        print_errors()
        try:
            job(resolved(config, _search(package)))
        except ValueError as error:
            _end(USER_ERROR, error)
        except JobFailed as error:
            _end(FAILED, error)
        except BrokenPipeError:
            _drop_output()
        except OSError as error:
            if error.errno is None:
                raise
            place = "" if error.filename is None else f": {error.filename}"
            _end(FAILED, f"{os.strerror(error.errno)}{place}")

    main = hydra.main(config_path=f"pkg://{package}", config_name=config_name, version_base="1.3")(guarded)
    try:
        with full_errors() as print_errors, kept_interrupts(), _lists_are_whole(sys.argv[1:]):
            main()
        sys.stdout.flush()
    except (HydraException, ValueError, yaml.YAMLError) as error:
        if composed:
            raise
        _end(USER_ERROR, mistake(error, config_name))
    except BrokenPipeError:
        _drop_output()
    except KeyboardInterrupt:
        print("interrupted: the same command resumes" if resumable else "interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)
    except SystemExit as exit_:
        # Hydra reports some composition errors itself, with exit code 1; these are user errors as well.
        if exit_.code == 1 and not composed:
            sys.exit(USER_ERROR)
        raise


def _drop_output() -> None:
    """Discard further output after its reader has closed the pipe, as in `nemo-ext train --help | head`."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
