"""Quantization: weights -> integers and steps, by rules of name pattern and scheme.

what is stored     rules  schemes  row_steps  logsteps  trellis  lowrank
rounding           rounding (to nearest)  clip_search  gptq  viterbi  solve (many matrices)
what errors cost   calibration  fisher  allocate
corrections        awq  lqer  tune  logit_fit
the whole model    job  files
"""
