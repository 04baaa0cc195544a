"""Tests of the watch try cures over few steps, too."""

from tests.diagnose.conftest import short_trials as short_trials
