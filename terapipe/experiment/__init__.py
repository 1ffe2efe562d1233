"""Comparisons that may be published: races of real runs, and sweeps over many settings."""

from terapipe.experiment.predictions import Predictor
from terapipe.experiment.races import AGAIN, AgainstBest, RaceResult, paired_speedup, prepare_race, race, run_race
from terapipe.experiment.sweeps import sweep

__all__ = ["AGAIN", "AgainstBest", "Predictor", "RaceResult", "paired_speedup", "prepare_race", "race", "run_race", "sweep"]
