"""The predictor of a profile, fitted once and kept as JSON beside it.

Fitting judges every model on shapes kept out of it, which takes a second or two; reading the result does not.
"""

from __future__ import annotations

import hashlib
from typing import Final

from heterollm.base import cache_root, load_or_make
from heterollm.profiler.predict.predictor import Predictor
from heterollm.profiler.records import Profile, record_line

__all__ = ["fitted_predictor", "profile_digest"]

PREDICTOR_VERSION: Final = 6
"""Raise when fitting the same profile gives another predictor: kept ones are then fitted anew."""


def fitted_predictor(profile: Profile) -> Predictor:
    """Return the predictor of a profile: the kept one if the profile has not changed, else a new one.

    Raises:
        ProfileError: There is too little to fit.
    """
    path = cache_root() / "predictors" / f"{profile_digest(profile)}.json"

    def fit() -> Predictor:
        return Predictor.fit(profile)

    return load_or_make(path, "fitting it again", read=Predictor.from_json, make=fit, text=Predictor.to_json)


def profile_digest(profile: Profile, inputs: str = "") -> str:
    """Return what files are named by that follow from a profile: what was measured decides, whenever it was.

    Args:
        profile: The profile.
        inputs: What else they follow from.
    """
    digest = hashlib.sha256(f"{PREDICTOR_VERSION} {profile.fingerprint}{inputs}".encode())
    for line in sorted(map(record_line, profile.records.values())):
        digest.update(line.encode())
    return digest.hexdigest()[:32]
