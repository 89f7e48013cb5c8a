# SPDX-License-Identifier: Apache-2.0
"""`rooftile bench`: our kernels, their peers and the roof of the machine, measured in one process on the same data.

decode.py ...       the cases of one family: entries, ours and the peers', each checked before it is timed
attention_peers.py  decode attention of others; vllm_products.py: 4-bit products of others
runner.py           case after case; what fails is left out with its reason
timing.py           how entries of a case take turns, and the ceilings of the machine
report.py           the results file of docs/design (schema 1) and its table
"""
