#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks that every module includes only what its layer allows (docs/architecture.md).

Also checks a few rules that hold per folder: CUDA headers only under backend/cuda, no getenv outside
cli/, no unchecked number parsing of outside text, an SPDX line in every source file, #pragma once in
every header, and no source file above 800 lines.

Usage: tools/check_layering.py [ROOT]     exit status 0 when clean.
"""
import pathlib
import re
import sys

# module -> modules it may include, besides itself. Public headers (spin/...) are listed as "public".
ALLOWED = {
    "base": {"public"},
    "layout": {"base"},
    "io": {"base", "public"},
    "backend": {"base", "layout", "public"},
    "backend/cpu": {"base", "layout", "backend", "public"},
    "backend/cuda": {"base", "layout", "backend", "public"},
    "text": {"base", "io", "public"},
    "kv": {"base", "layout", "backend", "public"},
    "model": {"base", "layout", "io", "backend", "public"},
    "sparse": {"base", "layout", "backend", "kv", "public"},
    "engine": {"base", "layout", "io", "backend", "backend/cpu", "backend/cuda", "text", "kv",
               "model", "sparse", "public"},
    "server": {"base", "io", "public"},
    "public": set(),
}
CLI = {"base", "server", "public", "cli"}
CLI_EXTRA = {"inspect": {"io", "model", "text", "layout"}}

INCLUDE = re.compile(r'^\s*#\s*include\s+[<"]([^">]+)[">]', re.M)
FOLDER_RULES = [
    (re.compile(r"#\s*include\s+[<\"](cuda|cublas|cudnn|nccl|cub/|nvtx)"), {"src/backend/cuda"},
     "CUDA headers appear only under backend/cuda"),
    (re.compile(r"\bgetenv\s*\("), {"cli"}, "getenv only in cli/"),
    (re.compile(r"\b(strto[a-z]+|ato[ifl]+|sto[iuldf]+l?)\s*\("), set(),
     "outside text is parsed by base/parse_number.h"),
]


def module_of(include, modules):
    """The module an include path belongs to, or None for a system or third-party header."""
    if include.startswith("spin/"):
        return "public"
    folder = include.rpartition("/")[0]
    return folder if folder in modules else None


def strip_comments(text):
    return re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.S)


def check_file(path, root, module, allowed, errors):
    text = path.read_text(encoding="utf-8")
    name = path.relative_to(root)
    for include in INCLUDE.findall(text):
        target = module_of(include, ALLOWED.keys() | {"cli"})
        if target is not None and target != module and target not in allowed:
            errors.append(f"{name}: {module} may not include {include} (module {target})")
    code = strip_comments(text)
    for pattern, folders, message in FOLDER_RULES:
        if pattern.search(code) and not any(str(name).startswith(f + "/") for f in folders):
            errors.append(f"{name}: {message}")
    if "SPDX-License-Identifier" not in text[:200]:
        errors.append(f"{name}: no SPDX line")
    # A -inl.h file is compiled once per instruction set and guards itself (Highway's convention).
    if path.suffix == ".h" and not path.name.endswith("-inl.h") and "#pragma once" not in text:
        errors.append(f"{name}: no #pragma once")


def main():
    root = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).parent.parent)
    root = root.resolve()
    errors, count = [], 0
    for path in sorted(root.glob("src/**/*")):
        if path.suffix not in (".h", ".cc", ".cu", ".cuh"):
            continue
        module = str(path.parent.relative_to(root / "src"))
        if module not in ALLOWED:
            errors.append(f"{path.relative_to(root)}: no module {module} in the table of layers")
            continue
        check_file(path, root, module, ALLOWED[module], errors)
        count += 1
    for path in sorted(root.glob("include/spin/*.h")):
        check_file(path, root, "public", ALLOWED["public"], errors)
        count += 1
    for path in sorted(root.glob("cli/*")):
        if path.suffix in (".h", ".cc"):
            check_file(path, root, "cli", CLI | CLI_EXTRA.get(path.stem, set()), errors)
            count += 1
    for folder in ("src", "include", "cli", "tests", "fuzz", "bench", "tools"):
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in (".h", ".cc", ".cu", ".cuh", ".py"):
                lines = path.read_text(encoding="utf-8").count("\n")
                if lines > 800:
                    errors.append(f"{path.relative_to(root)}: {lines} lines, at most 800")
    for error in errors:
        print(error, file=sys.stderr)
    print(f"layering: {count} files, {len(errors)} errors")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
