# SPDX-License-Identifier: Apache-2.0
"""Where rooftile plugs into other libraries. Each module uses rooftile's public names only and is imported on demand."""
