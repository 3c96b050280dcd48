"""Models from the Hugging Face hub, fetched only where downloading was allowed; nothing of them is ever run."""

from __future__ import annotations

import os
import re
from pathlib import Path

from apportion.errors import ModelError

PREFIX = "hf:"
SWITCH = "APPORTION_DOWNLOAD"
_REF = re.compile(r"hf:(?P<repo>\w[\w.-]*/\w[\w.-]*)(?:@(?P<revision>[\w.-]+))?")
_PATTERNS = ("*.json", "*.safetensors", "vocab.txt", "merges.txt", "*.model", "1_Pooling/*.json")


def find_on_hub(ref: str) -> Path:
    """The folder of ``hf:owner/name[@revision]``: from the hub's cache here, or downloaded where that is allowed.

    Only configurations, tokenizers and safetensors are fetched: no code and no pickles.

    Raises:
        ModelError: a reference of another form, not here and downloading not allowed, or not to be had.
    """
    match = _REF.fullmatch(ref)
    if match is None:
        raise ModelError(f"{ref!r} names no model on the hub; write it like hf:owner/name or hf:owner/name@revision")
    from huggingface_hub import snapshot_download

    allowed = os.environ.get(SWITCH) == "1"
    try:
        folder = snapshot_download(
            match["repo"],
            revision=match["revision"],
            allow_patterns=list(_PATTERNS),
            local_files_only=not allowed,
        )
    except Exception as error:  # the library raises many kinds: no such model, offline, not in the cache
        if not allowed:
            raise ModelError(f"{ref} is not in the hub's cache here; allow downloading it with {SWITCH}=1") from None
        line = " ".join(str(error).split())[:120]
        raise ModelError(f"{ref} can't be downloaded ({line}); check its name and the connection") from None
    return Path(folder)
