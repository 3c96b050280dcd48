"""The hub: nothing is fetched unless allowed, and what goes wrong is one line."""

from __future__ import annotations

import huggingface_hub
import pytest

from apportion.errors import ModelError
from apportion.models import hub
from apportion.models.load import is_factory, load


def test_nothing_is_downloaded_unless_allowed(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.delenv(hub.SWITCH, raising=False)
    asked = []

    def fetch(repo, **options):
        asked.append(options)
        raise OSError("not here")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    with pytest.raises(ModelError, match=f"{hub.SWITCH}=1"):
        load("hf:owner/name")
    assert asked[0]["local_files_only"] is True
    assert not any(pattern.endswith((".bin", ".py", ".pt")) for pattern in asked[0]["allow_patterns"])


def test_a_failed_download_is_one_line(monkeypatch):
    monkeypatch.setenv(hub.SWITCH, "1")

    def fetch(repo, **options):
        assert options["local_files_only"] is False
        assert options["revision"] == "v1"
        raise OSError("no\nroute\nto host")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    with pytest.raises(ModelError, match="no route to host") as caught:
        load("hf:owner/name@v1")
    assert "\n" not in str(caught.value)


def test_a_fetched_folder_is_loaded_like_any_other(monkeypatch):
    from apportion.models.registry import find_packaged

    folder = find_packaged("vit-64")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda repo, **options: str(folder))
    network = load("hf:owner/vit-64")
    assert network.origin.ref == "hf:owner/vit-64"
    assert network.origin.folder == folder


@pytest.mark.parametrize("ref", ["hf:name", "hf:owner/name/more", "hf:../etc", "hf:"])
def test_other_forms_are_refused(ref):
    with pytest.raises(ModelError, match="hf:owner/name"):
        load(ref)


def test_a_hub_reference_is_no_factory():
    assert not is_factory("hf:owner/name")
    assert is_factory("module.path:function")
