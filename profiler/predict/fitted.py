"""The predictor of a profile, fitted once and kept as JSON in the cache.

A fit compares the models on shapes that were kept out of it, which takes a second or two. Reading the file
takes milliseconds and imports neither scikit-learn nor SciPy.
"""

from __future__ import annotations

import hashlib
from typing import Final

from heterollm.base import load_or_make, own_folder
from heterollm.profiler.predict.predictor import Predictor
from heterollm.profiler.records import Profile, record_line

PREDICTOR_VERSION: Final = 7
"""Raise when a fit of the same profile gives another predictor: kept ones are then fitted again."""


def fitted_predictor(profile: Profile) -> Predictor:
    """Return the predictor of a profile: the kept one if the profile has not changed, else a new one.

    Raises:
        ProfileError: There is too little to fit.
    """
    path = own_folder("predictors") / f"{profile_digest(profile)}.json"

    def fit() -> Predictor:
        return Predictor.fit(profile)

    return load_or_make(path, "fitting it again", read=Predictor.from_json, make=fit, text=Predictor.to_json)


def profile_digest(profile: Profile, inputs: str = "") -> str:
    """Return a name for files that are computed from a profile; equal measurements give equal names.

    Args:
        profile: The profile.
        inputs: Other inputs of the computation, as text.
    """
    digest = hashlib.sha256(f"{PREDICTOR_VERSION} {profile.fingerprint}{inputs}".encode())
    for line in sorted(map(record_line, profile.records.values())):
        digest.update(line.encode())
    return digest.hexdigest()[:32]
