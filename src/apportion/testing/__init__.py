"""Suites that any Policy, Rule or Meter can inherit (``suites``, needs pytest), and toy models (``toys``)."""

from __future__ import annotations

import sys

if "pytest" in sys.modules:  # only pytest runs the suites; this lets their assertions show the values they compared
    sys.modules["pytest"].register_assert_rewrite("apportion.testing.suites")
