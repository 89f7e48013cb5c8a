# SPDX-License-Identifier: Apache-2.0
"""Where rooftile plugs into other libraries. Modules use rooftile's public names only and are imported on demand."""
