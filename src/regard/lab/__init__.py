"""The lab: claims about attention, checked by running them.

`claims` judges sentences and printed numbers by computation, `teasers` shows what breaks when a part of attention is
left out, `experiments` trains small models, and `design_space` lists the attentions that have a name.
"""
