"""Reads the arguments of Megatron that decide how large a checkpoint is, wherever they are written.

Accepted: a command line, a shell script with assignments and continued lines, and lines `key: value` or
`--key: value`, as in YAML. Words that are no flags of interest are passed over, but a flag that changes
the model in a way that the formulas do not cover is refused: a wrong plan is worse than none.
"""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path

from megatron_datastates.errors import OptionError, StorageError

_ASSIGNMENT = re.compile(r"(\w+)(\+?)=(.*)", re.DOTALL)
_VARIABLE = re.compile(r"\$(?:\{(\w+)(?::-([^${}]*))?\}|(\w+))")
_KEY = re.compile(r"(?:--)?([a-z][\w-]*):")
_SIMILAR = 0.9  # from 0 to 1: the least of a misspelt flag; Megatron's own differ by more
_UNKNOWN = {  # change the number of parameters in ways that are not in model.py
    "multi-latent-attention",
    "mtp-num-layers",
    "hybrid-layer-pattern",
    "hybrid-override-pattern",
    "experimental-attention-variant",
    "moe-latent-size",
    "heterogeneous-layers-config-path",
    "heterogeneous-layers-config-encoded-json",
    "spec",
    "softmax-type",
    "decoder-first-pipeline-num-layers",
    "decoder-last-pipeline-num-layers",
    "num-layers-in-first-pipeline-stage",  # their names in files for --yaml-cfg
    "num-layers-in-last-pipeline-stage",
    "pipeline-model-parallel-layout",
    "account-for-embedding-in-pipeline-split",
    "account-for-loss-in-pipeline-split",
    "use-megatron-fsdp",
    "use-torch-fsdp2",
}
_HARMLESS = {"spec": ("local",), "softmax-type": ("vanilla", "off-by-one")}
_NOTHING = ("none", "null", "~")  # Python's and YAML's words for a flag that is not given
_NO_POSITIONS = ("position-embedding-type", "none")  # where it is a choice of Megatron's
_MOST_DIGITS = 18
_OFF = ("false", "no", "off", "0")
BY_PARAMETERS = (
    "give --params N, such as 671B, and the parallel sizes for an estimate that spreads parameters evenly"
)


class Arguments:
    """Megatron's arguments by flag, without the leading dashes; the last of several values counts.

    Args:
        defaults: of a script's variables, those that were used.
    """

    def __init__(self, values: Mapping[str, str | None], defaults: Mapping[str, str] | None = None) -> None:
        self.defaults = dict(defaults or {})
        self._values = _by_flag(
            {
                flag: value
                for flag, value in values.items()
                if (value or "").lower() not in _NOTHING or (flag, value) == _NO_POSITIONS
            }
        )
        self._asked: set[str] = set()

    def require_formulas(self) -> None:
        """Raises OptionError if a flag changes the model in a way that the formulas do not cover."""
        for flag in sorted(_UNKNOWN & self._values.keys()):
            if (self._values[flag] or "").lower() not in (*_OFF, *_HARMLESS.get(flag, ())):
                raise OptionError(
                    f"--{flag}: `datastates plan` has no formula for models with it; {BY_PARAMETERS}"
                )

    def _get(self, flag: str) -> str | None:
        self._asked.add(flag)
        return self._values.get(flag)

    def has(self, flag: str) -> bool:
        """Returns whether a flag is set, and not to a word for off."""
        return not self.is_off(flag) and flag in self._values

    def is_off(self, flag: str) -> bool:
        """Returns whether a flag is there with a word for off."""
        return (self._get(flag) or "").lower() in _OFF

    def lacks(self, flag: str) -> bool:
        """Returns whether a flag is missing, or its value."""
        return self._get(flag) is None

    def text(self, flag: str, default: str) -> str:
        return self._get(flag) or default

    def number(self, flag: str, default: int | None = None) -> int:
        """Returns the number after a flag. Raises OptionError if it is missing, or no number above 0."""
        text = self._get(flag)
        if text is None and flag not in self._values and default is not None:
            return default
        is_long = text is not None and len(text) > _MOST_DIGITS
        if text is None or is_long or re.fullmatch(r"[0-9]+(_[0-9]+)*", text) is None or int(text) < 1:
            found = "nothing" if text is None else f"{len(text)} characters" if is_long else repr(text)
            raise OptionError(f"--{flag}: expected a whole number above 0, found {found}")
        return int(text)

    def unused(self) -> list[str]:
        """Returns the flags that no formula has asked for. Raises OptionError if one seems to be misspelt."""
        unused = sorted(self._values.keys() - self._asked)
        for flag in unused:
            for similar in difflib.get_close_matches(flag, self._asked, 1, _SIMILAR):
                raise OptionError(f"--{flag}: no such argument of Megatron; did you mean --{similar}?")
        return unused


def _by_flag(values: dict[str, str | None]) -> dict[str, str | None]:
    """Returns values by the flags of the command line, which files for --yaml-cfg do not have for all.

    Those have names of Megatron's TransformerConfig, and a number of query groups is enough there.
    """
    if "activation-func" in values:
        values["swiglu"] = "yes" if values.pop("activation-func") == "swiglu" else "no"
    if "num-moe-experts" in values:
        values.setdefault("num-experts", values.pop("num-moe-experts"))
    if "language-model" in values:
        del values["language-model"]
        values["group-query-attention"] = "yes" if "num-query-groups" in values else "no"
    return values


def flags_in(words: Iterable[str]) -> set[str]:
    """Returns the flags among words, without the leading dashes."""
    return set(_flags(list(words)))


def read_arguments(files: Iterable[Path], words: Iterable[str]) -> Arguments:
    """Reads arguments from files and then from words, which win. Raises StorageError and OptionError."""
    everything: list[str] = []
    defaults: dict[str, str] = {}
    for path in files:
        try:
            text = path.read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            reason = f"{path}: {error.strerror}: give a file with arguments of Megatron"
            raise StorageError.of(error, path, reason) from None
        try:
            everything += _resolved(_words(text), defaults)
        except ValueError as error:
            raise OptionError(f"{path} cannot be split into words as a shell does: {error}") from None
    return Arguments(_flags([*everything, *words]), defaults)


def _words(text: str) -> list[str]:
    """Splits a script into words. Raises ValueError if a shell could not, such as for an open quote."""
    # A line that is a comment does not go on in the next one, and a # within a word begins no comment:
    # shlex has other rules.
    text = re.sub(r"^[ \t]*#.*", "", text, flags=re.MULTILINE).replace("\\\n", " ")
    text = re.sub(r"(?<=[^\s;&|(])#", "\0", text)
    return [word.replace("\0", "#") for word in shlex.split(text, comments=True)]


def _resolved(words: list[str], defaults: dict[str, str]) -> list[str]:
    """Returns the words with variables that the file itself assigns; adds the defaults that were used."""
    known: dict[str, str] = {}

    def value(match: re.Match[str]) -> str:
        name, default = match[1] or match[3], match[2]
        if default is None:
            return known.get(name, match[0])
        if name not in known:  # the environment of this command need not be that of the job
            defaults[name] = default
        return known.get(name) or default

    found = []
    for word in words:
        word = _VARIABLE.sub(value, word.removesuffix(";"))
        assigned = None if word.startswith("-") else _ASSIGNMENT.fullmatch(word)
        if assigned:
            name, appends, word = assigned.groups()
            known[name] = known.get(name, "") + word if appends else word
            word = word.removeprefix("(")
        # ARGUMENTS=(--num-layers 4), and ARGUMENTS="--num-layers 4": a quoted list is one word of the file.
        parts = word.split()
        if next((part for part in parts if not part.startswith("$")), "").startswith("--"):
            found += parts
        elif not assigned:  # else it would be the value of a flag before it
            found.append(word)
    return found


def _without_array(word: str) -> str:
    """Returns a word without the parenthesis of a shell's array before or after it."""
    opened = word.count("(") - word.count(")")
    if opened > 0:
        return word.removeprefix("(")
    return word.removesuffix(")") if opened < 0 else word


def _flags(words: list[str]) -> dict[str, str | None]:
    values: dict[str, str | None] = {}
    current = ""
    for raw in words:
        word = _without_array(raw)
        if match := _KEY.fullmatch(word):
            current = match[1].replace("_", "-")
            values[current] = None
        elif word.startswith("--"):
            current, separator, value = word[2:].replace("_", "-").partition("=")
            values[current] = word.partition("=")[2] if separator else None
            current = "" if separator and value else current
        elif current and word:
            values[current], current = word, ""
    return values
