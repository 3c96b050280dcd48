"""Fitting an image backbone on the user's own pictures: class folders, or a folder of images without labels."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("PIL", reason="pictures need pillow")


def draw(folder, names):
    """Small pictures of noise around a colour of their own."""
    from PIL import Image

    rng = np.random.default_rng(0)
    for number, name in enumerate(names):
        colour = np.zeros(3)
        colour[number % 3] = 160
        pixels = np.clip(colour + rng.normal(48, 24, (24, 20, 3)), 0, 255).astype(np.uint8)
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(folder / name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("names", "quality"),
    [
        ([f"{('red', 'green', 'blue')[i % 3]}/{i}.png" for i in range(36)], "accuracy"),
        ([f"{i}.png" for i in range(36)], "agreement"),
    ],
    ids=["class folders", "no labels"],
)
def test_an_image_backbone_is_fitted_on_a_folder_of_pictures(apportion, tmp_path, names, quality):
    draw(tmp_path / "photos", names)
    (tmp_path / "photos" / names[0]).with_name("broken.png").write_bytes(b"not a picture")
    options = ("--data", "photos", "--budget", "params<=98%", "--rungs", 1, "--repair-steps", 1, "--rules", "prune")
    result = apportion.json("fit", "vit-64", *options, "-o", "run")
    assert result["exit"] == 0
    assert result["quality"] == quality
    assert result["final"]["params"]["value"] <= 0.98 * result["baseline"]["params"]["value"]
    assert apportion.json("verify", "run")["exit"] == 0


def test_a_folder_without_pictures_is_refused(told, tmp_path):
    (tmp_path / "empty").mkdir()
    done = told("fit", "vit-64", "--data", "empty", "--budget", "params<=98%", "-o", "run")
    assert done.returncode == 2
    assert "holds no images" in done.stderr
    assert done.stderr.strip().count("\n") == 0
