"""Names of everything in a run's store. A name is ours only if it matches one of these forms exactly.

Numbers are zero-padded so that listings, which stores sort as text, come in order. What does not match (`step-9`,
`step-100.bak`, `my-step-7`) belongs to somebody else and is neither counted nor touched.
"""

from __future__ import annotations

import re

from ..errors import ConfigError, FormatError
from ..storage.base import check_key
from ..types import CheckpointRef

__all__ = [
    "COMMITS",
    "GENERATIONS",
    "JOURNAL",
    "LEASES",
    "MANIFEST",
    "METADATA",
    "PINS",
    "PROOFS",
    "QUARANTINE",
    "RUN",
    "STEP_PREFIX",
    "WITNESS",
    "attempt_key",
    "attempt_name",
    "commit_key",
    "data_name",
    "digests_name",
    "generation_key",
    "holds",
    "lease_key",
    "object_key",
    "parse_about",
    "parse_attempt",
    "parse_commit",
    "parse_data_name",
    "parse_generation",
    "parse_hold",
    "part_name",
    "pin_key",
    "quarantine_key",
    "split_attempt_key",
    "stem",
]

RUN = "resilio.json"
COMMITS = "commits/"
GENERATIONS = "generations/"
PINS = "pins/"
LEASES = "leases/"
QUARANTINE = "quarantine/"
PROOFS = "proofs/"
WITNESS = "witness/"
JOURNAL = "journal/"
STEP_PREFIX = "step-"  # of attempt folders

# Names within an attempt's folder.
MANIFEST = "manifest.json"
METADATA = ".metadata"

_MAX_STEP = 999_999_999
_MAX_GENERATION = 999_999
_MAX_RANK = 10_000_000

# [0-9], not \d: \d takes the digits of every script.
_COMMIT = re.compile(r"commits/([0-9]{9})-g([0-9]{6})\.json")
_GENERATION = re.compile(r"generations/([0-9]{6})\.json")
_ATTEMPT = re.compile(r"step-([0-9]{9})-g([0-9]{6})-([0-9a-f]{4,32})")
_ABOUT = re.compile(r"([0-9]{9})-g([0-9]{6})")
_HOLD = re.compile(r"(pins/|leases/|quarantine/)([0-9]{9})-g([0-9]{6})-[0-9a-f]{4,32}\.json")
_SUFFIX = re.compile(r"[0-9a-f]{4,32}")
_DATA = re.compile(r"__(0|[1-9][0-9]{0,7})_(0|[1-9][0-9]{0,8})\.distcp")


def stem(ref: CheckpointRef) -> str:
    """How objects are named after a checkpoint: `000004000-g000007`.

    Raises:
        ConfigError: step or generation is out of range.
    """
    if not 0 <= ref.step <= _MAX_STEP:
        raise ConfigError(f"step {ref.step} is not within 0 and {_MAX_STEP}", step=ref.step)
    return f"{ref.step:09d}-{_g(ref.generation)}"


def commit_key(ref: CheckpointRef) -> str:
    """Key of a checkpoint's commit record: `commits/000004000-g000007.json`."""
    return f"{COMMITS}{stem(ref)}.json"


def parse_commit(key: str) -> CheckpointRef | None:
    """The checkpoint whose commit record has this key, None if it is no commit record's key."""
    found = _COMMIT.fullmatch(key)
    return _ref(found[1], found[2]) if found else None


def generation_key(generation: int) -> str:
    """Key of a generation record: `generations/000007.json`."""
    return f"{GENERATIONS}{_g(generation)[1:]}.json"


def parse_generation(key: str) -> int | None:
    """The number of the generation whose record has this key, None if it is no such key."""
    found = _GENERATION.fullmatch(key)
    return (int(found[1]) or None) if found else None


def attempt_name(step: int, generation: int, suffix: str) -> str:
    """Name of an attempt's folder: `step-000004000-g000007-7f3a`.

    `suffix` is 4 to 32 hex digits, new for each attempt.
    """
    return f"{STEP_PREFIX}{stem(CheckpointRef(generation, step))}-{_suffix(suffix)}"


def parse_attempt(name: str) -> CheckpointRef | None:
    """What the attempt folder of this name would be a checkpoint of, None if it is no such name."""
    found = _ATTEMPT.fullmatch(name)
    return _ref(found[1], found[2]) if found else None


def split_attempt_key(key: str) -> tuple[str, str] | None:
    """Attempt and object name of a key inside an attempt's folder, else None."""
    folder, slash, name = key.partition("/")
    return (folder, name) if slash and name and parse_attempt(folder) else None


def part_name(rank: int) -> str:
    """Name of a rank's part of the manifest, within the attempt's folder."""
    return f"manifest-{rank}.json"


def data_name(rank: int, number: int) -> str:
    """Name of a rank's n-th data object, within the attempt's folder. As stock DCP names them."""
    return f"__{rank}_{number}.distcp"


def parse_data_name(name: str) -> tuple[int, int] | None:
    """Rank and number of a data object, None if it is no data object's name."""
    found = _DATA.fullmatch(name)
    return (int(found[1]), int(found[2])) if found and int(found[1]) <= _MAX_RANK else None


def digests_name(data: str) -> str:
    """Name of the object with the block digests of the data object `data`."""
    if parse_data_name(data) is None:
        raise FormatError(f"{data!r} is no data object's name, so it has no digests object", name=data)
    return data.removesuffix(".distcp") + ".digests"


def attempt_key(attempt: str, name: str) -> str:
    """Key of the object `name` of an attempt. Both are our own; for names read from storage see `object_key`."""
    return f"{attempt}/{name}"


def object_key(attempt: str, name: str, where: str) -> str:
    """Key of an object that a record names, refused if it would lie outside the attempt's folder.

    Args:
        attempt: the attempt's folder.
        name: as the record says.
        where: the record's key, for the error.

    Raises:
        FormatError: `attempt` is no attempt's name, or `name` leaves the folder.
    """
    if parse_attempt(attempt) is None:
        raise FormatError(f"{where}: {attempt!r} is no name of an attempt's folder", where=where, name=attempt)
    try:
        return check_key(f"{attempt}/{name}")
    except ConfigError as error:
        raise FormatError(
            f"{where} names the object {name!r}, which does not lie in its own folder {attempt!r}; the record was "
            "tampered with or is damaged",
            where=where,
            name=name,
        ) from error


def pin_key(ref: CheckpointRef, suffix: str) -> str:
    """Key of a pin: `pins/000004000-g000007-7f3a.json`. `suffix` as for an attempt."""
    return f"{PINS}{stem(ref)}-{_suffix(suffix)}.json"


def lease_key(ref: CheckpointRef, suffix: str) -> str:
    """Key of a lease: `leases/000004000-g000007-7f3a.json`. `suffix` as for an attempt."""
    return f"{LEASES}{stem(ref)}-{_suffix(suffix)}.json"


def quarantine_key(ref: CheckpointRef, suffix: str) -> str:
    """Key of a quarantine record: `quarantine/000004000-g000007-7f3a.json`. `suffix` as for an attempt."""
    return f"{QUARANTINE}{stem(ref)}-{_suffix(suffix)}.json"


def parse_hold(key: str) -> CheckpointRef | None:
    """The checkpoint that the pin, lease or quarantine record of this key is about, None if it is no such key."""
    found = _HOLD.fullmatch(key)
    return _ref(found[2], found[3]) if found else None


def parse_about(key: str) -> CheckpointRef | None:
    """The checkpoint that `holds` finds an object of this key to be about, None if there is none."""
    found = _ABOUT.match(key.rpartition("/")[2])
    return _ref(found[1], found[2]) if found else None


def holds(key: str, ref: CheckpointRef) -> bool:
    """Whether a pin, lease or quarantine object of this key is about `ref`: its base name starts with the stem."""
    return key.rpartition("/")[2].startswith(stem(ref))


def _suffix(suffix: str) -> str:
    if not _SUFFIX.fullmatch(suffix):
        raise ConfigError(f"a suffix is 4 to 32 lower-case hex digits, not {suffix!r}", suffix=suffix)
    return suffix


def _g(generation: int) -> str:
    if not 1 <= generation <= _MAX_GENERATION:
        raise ConfigError(f"generation {generation} is not within 1 and {_MAX_GENERATION}", generation=generation)
    return f"g{generation:06d}"


def _ref(step: str, generation: str) -> CheckpointRef | None:
    return CheckpointRef(int(generation), int(step)) if int(generation) else None
