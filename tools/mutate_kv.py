#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Breaks src/kv in one place at a time and checks that a test notices.

Every mutation takes away one event wait, one hold, one generation or tag check, or one piece of
accounting. A changed copy of the source is compiled beside the others, so the working tree is never
touched, and the tests of src/kv run with a short model test. A mutation that no test notices is an
error.

Usage: tools/mutate_kv.py BUILD_DIR [NAME...]; BUILD_DIR has a build of the target spin_kv_tests.
"""
import json
import pathlib
import shlex
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent

# name: (file, text as it stands, text instead, what it takes away)
MUTATIONS = {
    "wait-writer": (
        "src/kv/page_mover.cc", "  stream.enqueue_wait(state->written);\n", "",
        "the mover's wait for the event of the pages' writer"),
    "requeue": (
        "src/kv/page_mover.cc", "for (const auto& state : core.in_flight) queue(core, state);",
        "while (!core.in_flight.empty()) settle_front(core, error);",
        "going on with the transfers behind one that failed"),
    "tag-last": (
        "src/kv/page_mover.cc", "to_host ? clear_tags(*state) : check_tags(*state);",
        "to_host ? write_tags(*state) : check_tags(*state);",
        "tags that name a page only after its bytes"),
    "tag-check": (
        "src/kv/page_mover.cc", "if (!state.tags.ok() || holds(page.tag, page.expected)) continue;",
        "if (state.core != nullptr) continue;",
        "the check of tags on the way to fast memory"),
    "tag-owner": (
        "src/kv/page_mover.cc", "tag->owner == expected.owner &&", "",
        "the owner in that check"),
    "tag-tokens": (
        "src/kv/page_mover.cc", " && tag->tokens == expected.tokens", "",
        "the number of tokens in that check"),
    "unfinished": (
        "src/kv/page_mover.cc", "    if (is_finished(*core.in_flight.front())) {\n      settle",
        "    if (true) {\n      settle",
        "telling a batch that ran from one that was skipped"),
    "mover-hold": (
        "src/kv/page_mover.cc", "PageMover::~PageMover() { wait_idle(); }",
        "PageMover::~PageMover() {}",
        "the mover's wait for its copies when it is destroyed"),
    "close-hold": (
        "src/kv/tiered_state.cc", "  (void)transfer.wait_result();\n", "",
        "the hold on slots and extents under a copy when a sequence is closed"),
    "demote-hold": (
        "src/kv/tiered_residence.cc", "  const Status copied = transfer.wait_result();\n  settle();",
        "  const Status copied = ok_status();",
        "the hold on slots until their copies are on the host"),
    "resume-hold": (
        "src/kv/tiered_residence.cc", "begun.ok() ? begun->wait_result() : begun.status();",
        "begun.ok() ? ok_status() : begun.status();",
        "the wait for pages that come back before a step may use them"),
    "demote-result": (
        "src/kv/tiered_residence.cc",
        "  if (!copied.ok()) return copied.with_context(\"demoting a sequence\");\n", "",
        "the result of a demotion's copies"),
    "resume-result": (
        "src/kv/tiered_residence.cc", "  if (!copied.ok()) {\n    release_slots();\n    return "
        "copied.with_context(\"resuming a sequence\");\n  }\n", "",
        "the result of a resumption's copies"),
    "watermark-result": (
        "src/kv/tiered_residence.cc", "const bool good = transfer.result().ok();",
        "const bool good = true;",
        "the result of write-through before its pages count as valid on the host"),
    "watermark-early": (
        "src/kv/tiered_residence.cc", "  if (!transfer.is_complete()) return;\n  const bool good",
        "  const bool good", "waiting for write-through before its pages count"),
    "slot-generation": (
        "src/kv/page_pool.cc", " &&\n         pages_[page.slot].generation == page.generation", "",
        "the generation in the check of a slot's handle"),
    "slot-current": (
        "src/kv/page_pool.cc", "  SPIN_CHECK(is_current(page));\n", "",
        "the check of a slot's handle"),
    "extent-tags": (
        "src/kv/host_pool.cc", "    *layout_.tag(extent, page) = layout::HostPageTag();\n",
        "    (void)page;\n", "clearing the tags of an extent's earlier owner"),
    "extent-in-use": (
        "src/kv/host_pool.cc", "index < in_use_.size() && in_use_[index] == 1);\n  in_use_[index] = 0",
        "index < in_use_.size());\n  in_use_[index] = 0",
        "the check that an extent is released once"),
    "take-extents": (
        "src/kv/tiered_sequence.cc",
        "    impl.take_extents(layer, item.tail.first_page, uint64_t{item.tail.first_page} + pages);\n",
        "", "host pages for what a step seals"),
    "spent": (
        "src/kv/tiered_sequence.cc", "    impl.spent = impl.spent || state.left_tail;\n", "",
        "closing a sequence whose dropped step moved pages"),
    "bury-slots": (
        "src/kv/tiered_state.cc", "      store.fast().release({&state.slots[page], 1});\n", "",
        "giving back the slots of dead ids"),
    "bury-extents": (
        "src/kv/tiered_state.cc", "      host->release(extent);\n      extent = 0;\n", "",
        "giving back extents that only dead ids would need"),
    "unreserve": (
        "src/kv/tiered_state.cc", "  host->unreserve(extents_reserved);\n}", "}",
        "giving back what was reserved when a sequence is closed"),
    "capture": (
        "src/kv/tiered_state.cc",
        "  stream.enqueue_copy(to.counts.data(), map.counts, to.counts.size() * sizeof(uint32_t));\n",
        "  std::copy_n(map.counts, to.counts.size(), to.counts.data());\n",
        "reading a map behind the kernel that makes it"),
    "tail-slots": (
        "src/kv/tiered_sequence.cc", "  if (!impl.is_flat(layer)) {\n    item.tail_slots =",
        "  if (false) {\n    item.tail_slots =",
        "noting where the tail's pages lie in a step"),
    "directory-seal": (
        "src/kv/tiered_sequence.cc",
        "pages);\n    impl.enqueue_directory(layer, stream);\n", "pages);\n",
        "showing kernels the extents of what a step seals"),
    "directory-repack": (
        "src/kv/tiered_sequence.cc",
        "end);\n    impl.enqueue_directory(layer, stream);\n", "end);\n",
        "showing kernels the extents of what a step deals out"),
    "directory-place": (
        "src/kv/tiered_sequence.cc",
        "sealed_end(layer));\n    impl.enqueue_directory(layer, stream);\n", "sealed_end(layer));\n",
        "showing kernels the extents of a prompt"),
    "records-place": (
        "src/kv/tiered_sequence.cc",
        "    impl.tables.enqueue_records(first, kv_heads, stream);\n", "",
        "showing kernels how many entries a prompt pins"),
    "directory-resume": (
        "src/kv/tiered_residence.cc", "      SPIN_RETURN_IF_ERROR(publish_directory());\n", "",
        "showing kernels the extents of a sequence that comes back"),
    "tables-resume": (
        "src/kv/tiered_residence.cc",
        "      SPIN_RETURN_IF_ERROR(made.publish(store.table_stream()));\n", "",
        "the tables of a sequence that comes back"),
    "directory-resize": (
        "src/kv/tiered_residence.cc",
        "    SPIN_RETURN_IF_ERROR(publish_directory());\n    return made", "    return made",
        "showing kernels the extents of a sequence that becomes tiered"),
    "tables-resize": (
        "src/kv/tiered_residence.cc",
        "    return made.publish(store.table_stream());\n", "    return ok_status();\n",
        "the tables of a lease that was resized"),
    "records-reserve": (
        "src/kv/tiered_state.cc",
        "    tables.enqueue_records(0, head_count(), store.table_stream());\n", "",
        "showing kernels the directory of a sequence that had no host pages"),
    "dead-slots": (
        "src/kv/tiered_sequence.cc", "  impl.publish_buried();\n  impl.committed_tokens = tokens;",
        "  impl.committed_tokens = tokens;", "taking the slots of dead ids from kernels"),
    "ghosts": (
        "src/kv/tiered_state.cc",
        "  return copy_now(ghosts, lists.data(), ghost_lists.bytes(), stream);", "  return ok_status();",
        "what a smaller lease gave up, as a measure of reuse"),
    "zones": (
        "src/kv/tiered_residence.cc", "  std::copy(pages.begin(), pages.end(), zone.begin() + sinks);\n",
        "", "the pinned pages of a lease that becomes tiered"),
    "resume-zones": (
        "src/kv/tiered_residence.cc",
        "      bring(sinks + i, zone[i], sealed_tokens(layer, h, zone[i]));\n", "      (void)i;\n",
        "bringing pinned pages back"),
    "demote-tail": (
        "src/kv/tiered_residence.cc",
        "std::min(geometry.page_tokens, at.tokens - t * geometry.page_tokens);\n          copies",
        "geometry.page_tokens;\n          copies",
        "the number of valid tokens of the open page"),
    "epoch": (
        "src/kv/tiered_sequence.cc", "  ++impl.epoch;\n", "",
        "the step of LRU time"),
}


LIBRARIES = ["tests/libspin_test_support.a", "libspin_backend_cpu.a", "libspin_backend.a",
             "libspin_base.a"]
SYSTEM = ["-lhwy", "-lspdlog", "-lfmt", "-lgtest_main", "-lgtest", "-lpthread"]


def run(command, **options):
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                          check=False, **options)


def first_failure(output):
    for line in output.splitlines():
        if line.startswith("[  FAILED  ]"):
            return line.split()[3].rstrip(",")
    started = [line.split()[-1] for line in output.splitlines() if line.startswith("[ RUN")]
    return f"{started[-1]} (aborted)" if started else "nothing ran"


class Builder:
    """Objects of src/kv and tests/kv, and the program made of them."""

    def __init__(self, build):
        self.build = build
        self.folder = build / "mutations"
        self.folder.mkdir(exist_ok=True)
        entries = json.loads((build / "compile_commands.json").read_text(encoding="utf-8"))
        self.commands = {}
        for entry in entries:
            file = pathlib.Path(entry["file"]).relative_to(ROOT)
            if str(file).startswith(("src/kv/", "tests/kv/")):
                self.commands[str(file)] = shlex.split(entry["command"])

    def compile(self, file, text=None):
        """Returns the object of a source, or of `text` in its place."""
        name = file.replace("/", "_")
        source, target = ROOT / file, self.folder / (name + ".o")
        if text is not None:
            source, target = self.folder / ("mutated_" + name), self.folder / (name + ".mutated.o")
            source.write_text(text, encoding="utf-8")
        command = list(self.commands[file])
        command[command.index("-o") + 1] = str(target)
        command[command.index("-c") + 1] = str(source)
        # Checks on, so that pages which nobody may read any more are filled with NaNs.
        built = run(command + ["-UNDEBUG", "-O1", "-w"], cwd=self.build)
        if built.returncode != 0:
            sys.exit(f"{file} does not build\n{built.stdout[-2000:]}")
        return target

    def link(self, objects):
        program = self.folder / "tests"
        libraries = [str(self.build / library) for library in LIBRARIES]
        linked = run(["c++", "-o", program, *objects, *libraries, *SYSTEM])
        if linked.returncode != 0:
            sys.exit(f"the tests do not link\n{linked.stdout[-2000:]}")
        return program


def fails(program):
    """The first test that fails, or nothing."""
    try:
        tested = run([program], timeout=300, env={"SPIN_MODEL_OPERATIONS": "100000"})
    except subprocess.TimeoutExpired:
        return "a test that hangs"
    return first_failure(tested.stdout) if tested.returncode != 0 else ""


def main():
    if len(sys.argv) < 2:
        print(__doc__, file=sys.stderr)
        return 2
    builder = Builder(pathlib.Path(sys.argv[1]).resolve())
    objects = {file: builder.compile(file) for file in builder.commands}
    wrong = fails(builder.link(objects.values()))
    if wrong:
        print(f"the tests fail without a mutation: {wrong}", file=sys.stderr)
        return 1
    names, survivors = sys.argv[2:] or list(MUTATIONS), 0
    for name in names:
        file, old, new, what = MUTATIONS[name]
        text = (ROOT / file).read_text(encoding="utf-8")
        if text.count(old) != 1:
            print(f"{name}: its text stands {text.count(old)} times in {file}", flush=True)
            survivors += 1
            continue
        mutated = dict(objects)
        mutated[file] = builder.compile(file, text.replace(old, new))
        by = fails(builder.link(mutated.values()))
        print(f"{name}: {what}: {'caught by ' + by if by else 'NOT CAUGHT'}", flush=True)
        survivors += not by
    print(f"{len(names)} mutations, {survivors} not caught")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
