"""The predictor of a profile, fitted once and kept as JSON beside it.

Fitting judges every model on shapes kept out of it, which takes a second or two; reading the result does not.
"""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path
from typing import Final

from heterollm.errors import CacheError, ProfileError
from heterollm.kernels.cache import atomic_path, cache_root
from heterollm.profiler.predictor import Predictor
from heterollm.profiler.profile import Profile
from heterollm.profiler.record_json import record_line

__all__ = ["PREDICTOR_VERSION", "fitted_predictor"]

logger = logging.getLogger(__name__)

PREDICTOR_VERSION: Final = 3
"""Raise when fitting the same profile gives another predictor: kept ones are then fitted anew."""


def fitted_predictor(profile: Profile) -> Predictor:
    """Return the predictor of a profile: the kept one if the profile has not changed, else a new one.

    Raises:
        ProfileError: There is too little to fit.
    """
    path = _path(profile)
    try:
        return Predictor.from_json(path.read_bytes())
    except FileNotFoundError:
        pass
    except (OSError, ProfileError) as error:
        logger.warning("The kept predictor %s is not used (%s); fitting it again", path, error)
    predictor = Predictor.fit(profile)
    try:
        with atomic_path(path) as temporary:
            temporary.write_text(predictor.to_json(), "utf-8")
    except CacheError as error:
        logger.warning("The predictor is not kept: %s", error)
    return predictor


def _path(profile: Profile) -> Path:
    """Return the file of a profile's predictor: what was measured decides, whenever it was."""
    digest = hashlib.sha256(f"{PREDICTOR_VERSION} {profile.fingerprint}".encode())
    for line in sorted(map(record_line, profile.records.values())):
        digest.update(line.encode())
    return cache_root() / "predictors" / f"{digest.hexdigest()[:32]}.json"
