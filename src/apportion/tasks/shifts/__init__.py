"""Shifts between what is learnt from and what is judged: labels, corruptions, spurious cues, and mixtures."""

from apportion.tasks.shifts.corrupt import corrupt, corruptions
from apportion.tasks.shifts.labels import label_noise, label_shift
from apportion.tasks.shifts.mixture import Mixture
from apportion.tasks.shifts.spurious import cue_episode, with_cues

__all__ = ["Mixture", "corrupt", "corruptions", "cue_episode", "label_noise", "label_shift", "with_cues"]
