# SPDX-License-Identifier: Apache-2.0
"""What `rooftile demo` is made of: the variants and how they are measured, the tables, the picture."""
