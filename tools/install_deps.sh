#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Installs the Debian 12 packages that are missing, as root or through sudo; does nothing, quickly,
# when all are there. Usage: tools/install_deps.sh [build|demo|test|ci]   (build; each group holds the
# ones before it)
set -euo pipefail

group=${1:-build}
build=(ca-certificates g++ cmake make ninja-build pkg-config ccache mold
  nlohmann-json3-dev libsimdjson-dev libcli11-dev libspdlog-dev libfmt-dev libboost1.81-dev
  libpcre2-dev libutf8proc-dev libxxhash-dev libhwy-dev prometheus-cpp-dev)
demo=(python3 python3-venv python3-pip)
test=(git libgtest-dev libgmock-dev)
# libclang-rt-14-dev holds the sanitizer and fuzzer runtimes, which clang-14 only recommends.
ci=(clang-14 libclang-rt-14-dev clang-tidy-14 clang-format-14 libbenchmark-dev)

case $group in
  build) wanted=("${build[@]}") ;;
  demo) wanted=("${build[@]}" "${demo[@]}") ;;
  test) wanted=("${build[@]}" "${demo[@]}" "${test[@]}") ;;
  ci) wanted=("${build[@]}" "${demo[@]}" "${test[@]}" "${ci[@]}") ;;
  *)
    echo "install_deps: no group $group; expected build, demo, test or ci" >&2
    exit 2
    ;;
esac

if [ "${SPIN_SKIP_DEPS:-0}" = 1 ]; then
  echo "install_deps: skipped (SPIN_SKIP_DEPS=1)" >&2
  exit 0
fi
if ! command -v dpkg-query >/dev/null || ! command -v apt-get >/dev/null; then
  echo "install_deps: this is not a Debian system. Install the equivalents of these Debian 12 packages,
  then set SPIN_SKIP_DEPS=1: ${wanted[*]}" >&2
  exit 1
fi

# dpkg-query fails when it does not know one of the names; what it knows is printed all the same.
installed=$(dpkg-query -W -f='${db:Status-Status} ${Package}\n' "${wanted[@]}" 2>/dev/null || true)
missing=()
for package in "${wanted[@]}"; do
  grep -qxF "installed $package" <<<"$installed" || missing+=("$package")
done
[ ${#missing[@]} -eq 0 ] && exit 0

as_root=()
if [ "$(id -u)" -ne 0 ]; then
  if ! command -v sudo >/dev/null; then
    echo "install_deps: missing packages, and neither root nor sudo. As root, run:
  apt-get install --no-install-recommends ${missing[*]}" >&2
    exit 1
  fi
  as_root=(sudo)
fi
echo "install_deps: installing ${missing[*]}" >&2
apt=("${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=300)
# A list that is a little old is good enough, so a failed update is not the end.
"${apt[@]}" update -q >&2 || echo "install_deps: apt-get update failed; going on" >&2
"${apt[@]}" install -q -y --no-install-recommends "${missing[@]}" >&2 || {
  echo "install_deps: apt-get could not install ${missing[*]}" >&2
  exit 1
}
