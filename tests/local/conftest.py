from __future__ import annotations

import sys

# The vendor's SDK needs Python 3.11.
collect_ignore = ["test_vendor_sdk.py"] if sys.version_info < (3, 11) else []
