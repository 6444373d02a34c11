"""Files of the Hugging Face hub: whether there are any, and a local directory with them."""

from __future__ import annotations

import re
from collections.abc import Sequence

from psearch_jax.types import UserError

TIMEOUT_S = 5.0
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")


def is_hub_id(name: str) -> bool:
    """Whether a name has the form OWNER/NAME."""
    return bool(_HUB_ID.fullmatch(name))


def reachable(hub_id: str, file: str = "config.json") -> bool:
    """Whether a file of a hub id is in the local cache or on the hub: one request of at most `TIMEOUT_S`.

    A download would retry for half a minute before it reports that there is no network.
    """
    if not is_hub_id(hub_id):
        return False
    import huggingface_hub as hub  # a dependency of transformers

    if isinstance(hub.try_to_load_from_cache(hub_id, file), str):
        return True
    try:
        hub.get_hf_file_metadata(hub.hf_hub_url(hub_id, file), timeout=TIMEOUT_S)
    except Exception:  # the hub client raises a dozen types (offline, not found, no access); all mean no
        return False
    return True


def snapshot(hub_id: str, patterns: Sequence[str], name: str) -> str:
    """The local directory with the files of a hub id that match `patterns`, downloaded if necessary.

    Raises `UserError`, which begins with `name`, if they can neither be found nor fetched.
    """
    from huggingface_hub import snapshot_download

    try:
        return snapshot_download(hub_id, allow_patterns=list(patterns))
    except Exception as error:  # the hub client raises a dozen types; all mean the same to the user
        raise UserError(
            f"{name}: {hub_id!r} is not a directory and could not be fetched from the hub "
            f"({type(error).__name__}); download it elsewhere with `hf download {hub_id}` and give its directory"
        ) from error
