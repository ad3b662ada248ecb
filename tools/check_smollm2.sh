#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Fetches SmolLM2 and checks it against its reference. A failed download is a failure.
set -euo pipefail
cd "$(dirname "$0")/.."
tools/fetch_smollm2.sh
exec python3 tools/check_smollm2.py
