"""wholestep where people train: each module here is for one framework, and imports it.

transformers    WholestepTrainer, WholestepTrainerMixin
lightning       WholestepCallback
accelerate      nothing is needed: `ws.compile` takes a step that is written for Accelerate or Fabric
"""

from __future__ import annotations
