"""A model of a Snapdragon: what its GPU, NPU and memory would need for a piece of work, in modelled time.

Pure functions of parameters that live in YAML files beside this package; no time here was measured. The
equations, where each number comes from and what the model cannot say: ``docs/soc-model.md``.
"""
