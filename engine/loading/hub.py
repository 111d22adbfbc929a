"""Models named by a hub id: the folder in the hub's cache, fetched first where that is allowed."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from .cache_dir import is_offline

CONFIG_FILES = ("*.json", "*.jinja", "tokenizer.model")
WEIGHT_FILES = {"safetensors": "*.safetensors", "pt": "pytorch_model*.bin"}
# the same weights once more in their makers' own format
DUPLICATES = ("original/*", "consolidated*")


def hub_folder(model: str, load_format: str, revision: str | None, download_dir: str | Path | None) -> Path:
    """The folder of a hub id's snapshot. Raises ValueError saying what was looked for and where."""
    if load_format in ("auto", "safetensors", "pt"):
        kinds = [load_format] if load_format != "auto" else ["safetensors", "pt"]
        for kind in kinds:
            folder = _snapshot(model, (*CONFIG_FILES, WEIGHT_FILES[kind]), revision, download_dir)
            if any(folder.glob(WEIGHT_FILES[kind])):
                return folder
        wanted = " or ".join(WEIGHT_FILES[kind] for kind in kinds)
        raise ValueError(f"model {model!r}: expected {wanted} in its snapshot {folder}, found none")
    return _snapshot(model, CONFIG_FILES, revision, download_dir)


def _snapshot(model: str, patterns: tuple[str, ...], revision: str | None, download_dir: str | Path | None) -> Path:
    where, what = Path(download_dir or constants.HF_HUB_CACHE), f"model {model!r}, revision {revision or 'main'}"
    offline = constants.HF_HUB_OFFLINE or is_offline()
    try:
        folder = snapshot_download(
            model,
            revision=revision,
            cache_dir=where,
            allow_patterns=list(patterns),
            ignore_patterns=list(DUPLICATES),
            local_files_only=offline,
        )
    except HFValidationError as error:
        raise ValueError(f"model {model!r} is no alias, no folder, no .gguf file and no hub id: {error}") from error
    except GatedRepoError as error:
        raise ValueError(f"{what}: its terms have to be accepted first: log in with `hf auth login`") from error
    except (RepositoryNotFoundError, RevisionNotFoundError) as error:
        raise ValueError(f"{what}: the hub does not have it: {error}") from error
    except (LocalEntryNotFoundError, HfHubHTTPError) as error:
        why = (
            "HF_HUB_OFFLINE or OCTAVO_OFFLINE forbids to fetch it"
            if offline
            else f"fetching it failed: {str(error).splitlines()[0]}"
        )
        raise ValueError(
            f"{what}: looked for {', '.join(patterns)} in the cache {where}, found no snapshot; {why}. "
            "Fetch it once online, or pass a folder, a .gguf file or an alias"
        ) from error
    return Path(folder)
