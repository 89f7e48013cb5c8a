# SPDX-License-Identifier: Apache-2.0
"""`rooftile bench`: our kernels, their peers and the roof of the machine, measured in one process on the same data.

timing.py      how a call is timed, and the ceilings of the machine
decode.py ...  the cases of one family, ours and the peers', each checked before it is timed
report.py      the results file of docs/design (schema 1) and its table
"""
