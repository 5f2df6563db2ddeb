"""The pages' logic, run by Node: the simulator's allocators, the charts' numbers, the playground's requests."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
from importlib.resources import files

import pytest

from service.bench.kv_policies.policies import ALLOCATORS
from service.engine.kv.block_pool import OutOfBlocks

NODE = shutil.which("node")
MODULES = ("allocators", "series", "conversations")

pytestmark = pytest.mark.skipif(NODE is None, reason="no Node on this machine")


@pytest.fixture(scope="module")
def scripts(tmp_path_factory):
    """The modules under names that Node takes for modules."""
    folder = tmp_path_factory.mktemp("scripts")
    for name in MODULES:
        (folder / f"{name}.mjs").write_text((files("service.gateway") / "ui" / f"{name}.js").read_text())
    return folder


def run(folder, script: str, given: object = None) -> object:
    """Return what `script` assigns to `answer`, with `given` in scope."""
    imports = "\n".join(f'import * as {name} from "./{name}.mjs";' for name in MODULES)
    text = f"{imports}\nconst given = {json.dumps(given)};\nlet answer;\n{script}\nconsole.log(JSON.stringify(answer));"
    (folder / "script.mjs").write_text(text)
    done = subprocess.run([NODE, "script.mjs"], cwd=folder, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


REPLAY = """
const made = new allocators[given.kind](given.size);
const regions = [];
answer = given.operations.map(([isTake, value]) => {
  if (isTake) {
    if (!made.fits(value)) { regions.push(null); return [null, made.numFree]; }
    const region = made.take(value);
    regions.push(region);
    return [region.start, region.size, made.numFree];
  }
  const region = regions[value];
  if (region) made.giveBack(region);
  return [made.numFree];
});
"""


@pytest.mark.parametrize(("kind", "name"), [("BestFit", "best-fit"), ("Buddy", "buddy")])
@pytest.mark.parametrize("size", [64, 100])
def test_allocators_match_the_bench(scripts, kind, name, size):
    chance, allocator = random.Random(size), ALLOCATORS[name](size)
    operations, regions, expected, held = [], [], [], []
    for _ in range(300):
        if held and chance.random() < 0.45:
            index = held.pop(chance.randrange(len(held)))
            operations.append((False, index))
            allocator.give_back(regions[index])
            expected.append([allocator.num_free])
            continue
        count = chance.randint(1, 20)
        operations.append((True, count))
        try:
            region = allocator.take(count)
        except OutOfBlocks:
            regions.append(None)
            expected.append([None, allocator.num_free])
            continue
        held.append(len(regions))
        regions.append(region)
        expected.append([region.start, len(region), allocator.num_free])
    assert any(None in line for line in expected)
    assert run(scripts, REPLAY, {"kind": kind, "size": size, "operations": operations}) == expected


SIMULATE = """
function simulate(seed, numSteps) {
  const simulation = new allocators.Simulation({ seed, rate: 0.24, numSlots: 4096, maxLen: 512, blockSize: given });
  const faults = [];
  for (let step = 0; step < numSteps; step++) {
    simulation.advance();
    for (const [name, machine] of Object.entries(simulation.machines)) {
      const values = Object.values(machine.usage);
      if (values.some((value) => value < 0)) faults.push(`${name} ${step}: ${JSON.stringify(machine.usage)}`);
      const numKnown = machine.numDone + machine.running.length + machine.waiting.length;
      if (numKnown !== simulation.arrivals.numRequests) faults.push(`${name} ${step}: a request is lost`);
      if (step % 40) continue;
      const { memory, running } = machine;
      const slotsOf = (run) => Array.from({ length: memory.held(run) }, (_, index) => memory.slot(run, index));
      const slots = running.flatMap(slotsOf);
      if (new Set(slots).size !== slots.length) faults.push(`${name} ${step}: a slot has two owners`);
      if (slots.length !== machine.numSlots - memory.numFree) faults.push(`${name} ${step}: slots leak`);
    }
  }
  const figures = Object.entries(simulation.machines).map(([name, machine]) => {
    const { numDone, numTokens, numPreempted, usage, sums } = machine;
    return [name, { numDone, numTokens, numPreempted, usage, sums }];
  });
  return { faults, figures: Object.fromEntries(figures) };
}
answer = { first: simulate(7, 400), again: simulate(7, 400), other: simulate(8, 10) };
"""


def test_the_simulation_is_repeatable_and_counts_every_slot(scripts):
    answer = run(scripts, SIMULATE, 16)
    assert answer["first"]["faults"] == []
    assert answer["first"] == answer["again"]
    assert answer["first"] != answer["other"]
    sums = {name: figures["sums"] for name, figures in answer["first"]["figures"].items()}
    assert all(sum(each.values()) == 400 * 4096 for each in sums.values())
    done = [answer["first"]["figures"][name]["numDone"] for name in ("naive", "buddy", "paged")]
    assert done == sorted(done)
    assert sums["paged"]["internal"] < 0.01 * 400 * 4096 < sums["buddy"]["internal"] < sums["naive"]["internal"]
    assert sums["paged"]["external"] == sums["naive"]["external"] == 0 < sums["buddy"]["external"]


def test_a_sequence_that_fills_paged_memory_is_preempted_and_ends(scripts):
    """One block too few for both: the younger waits, and both end with all their tokens."""
    answer = run(
        scripts,
        """
        const machine = new allocators.Machine("paged", { numSlots: 48, maxLen: 32, blockSize: 16 });
        machine.advance([0, 1].map((id) => ({ id, arrival: 0, prompt: 10, output: 22, total: 32 })));
        for (let step = 0; step < 80; step++) machine.advance([]);
        answer = [machine.numDone, machine.numTokens, machine.numPreempted, machine.usage.free];
        """,
    )
    assert answer == [2, 44, 1, 48]


def snapshot(at_s: float, worker: str = "w", **stats: float) -> dict:
    latency = {"ttft": stats.pop("ttft", [0, 0, 0]), "gap": [0, 0, 0]}
    bounds = {"ttft": [0.1, 0.5, None], "gap": [0.1, 0.5, None]}
    workers = [{"id": worker, "stats": stats}]
    return {"at_s": at_s, "workers": workers, "latency": latency, "latency_bounds_s": bounds, "num_queued": 2}


def test_rates_and_quantiles(scripts):
    snapshots = [
        snapshot(1.0, generation_tokens_total=100.0, num_running=1.0),
        snapshot(3.0, generation_tokens_total=150.0, num_running=2.0, num_waiting=1.0, ttft=[0, 10, 10]),
        snapshot(4.0, worker="restarted", generation_tokens_total=20.0, ttft=[0, 10, 20]),
    ]
    script = """
    const history = new series.History(2);
    for (const [index, state] of given.entries()) history.push(state, 1000 + index);
    const names = ["output", "running", "waiting", "ttft50", "ttft99", "acceptance"];
    answer = [history.rows.length, history.columns(names, 60)];
    """
    num_rows, columns = run(scripts, script, snapshots)
    assert num_rows == 2
    time, output, running, waiting, median, slow, acceptance = columns
    assert time == [1001, 1002]
    assert output == [25, 0]  # a worker that restarted counts from anew
    assert (running, waiting) == ([2, 0], [3, 2])
    assert [round(value) for value in median] == [300, 500]  # linear in the bucket of 100 to 500 ms
    assert [round(value) for value in slow] == [496, 500]  # no more than the last bound
    assert acceptance == [None, None]


def test_a_first_snapshot_has_no_rate(scripts):
    script = "answer = new series.History(9).push(given, 1000)[series.COLUMNS.indexOf('output')];"
    assert run(scripts, script, snapshot(1.0, generation_tokens_total=100.0)) is None


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (72, 2434, [10, 100, 1000, 10000]),
        (18.6, 64, [10, 20, 50, 100]),
        (0.4, 12, [0.1, 1, 10, 100]),
        (100, 100, [100, 200, 500, 1000]),
        (None, None, [1, 10, 100, 1000]),
    ],
)
def test_a_logarithmic_axis_has_whole_decades(scripts, low, high, ticks):
    found = run(scripts, "answer = series.logTicks(...series.decades(...given));", [low, high])
    assert found == pytest.approx(ticks)


def test_a_pause_breaks_the_lines(scripts):
    script = """
    const history = new series.History(9);
    history.push(given, 1000);
    history.push(given, 1060);
    answer = history.columns(["running"], 600);
    """
    assert run(scripts, script, snapshot(1.0, num_running=4.0)) == [[1000, 1059, 1060], [4, None, 4]]


FORM = {
    "system": "Be brief.",
    "temperature": "0.5",
    "top_p": "",
    "max_tokens": "9",
    "stop": "a\n\nb",
    "tools": '{"name": "f", "parameters": {}}',
    "tool_choice": "required",
    "schema": '{"type": "object"}',
    "logprobs": "on",
}


def test_a_request_has_what_the_form_says(scripts):
    script = """
    const messages = [{ role: "user", content: "Hi", figures: "x" }, { role: "assistant", content: "", error: "gone" }];
    answer = conversations.requestBody("m", messages, given);
    """
    assert run(scripts, script, FORM) == {
        "model": "m",
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.5,
        "max_tokens": 9,
        "stop": ["a", "b"],
        "logprobs": True,
        "top_logprobs": 5,
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
        "tool_choice": "required",
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "answer", "schema": {"type": "object"}, "strict": True},
        },
    }


def test_a_broken_box_is_named(scripts):
    script = 'try { conversations.requestBody("m", [], given); } catch (error) { answer = error.message; }'
    assert run(scripts, script, {"schema": "{"}).startswith("JSON schema is not valid JSON: ")


def test_tool_calls_are_put_together_and_wait_for_results(scripts):
    script = """
    const message = { role: "assistant", content: "" };
    const call = (part) => ({ choices: [{ delta: { tool_calls: [part] } }] });
    conversations.applyChunk(message, call({ index: 0, id: "c1", function: { name: "f", arguments: '{"a"' } }));
    conversations.applyChunk(message, call({ index: 0, function: { arguments: ": 1}" } }));
    conversations.applyChunk(message, call({ index: 1, id: "c2", function: { name: "g", arguments: "{}" } }));
    conversations.applyChunk(message, { choices: [], usage: { prompt_tokens: 1, completion_tokens: 2 } });
    const messages = [{ role: "user", content: "x" }, message, { role: "tool", content: "1", tool_call_id: "c1" }];
    const waiting = conversations.openCalls(messages).map((one) => one.id);
    answer = [message.tool_calls.map((one) => one.function), waiting, message.usage];
    """
    calls, waiting, usage = run(scripts, script)
    assert calls == [{"name": "f", "arguments": '{"a": 1}'}, {"name": "g", "arguments": "{}"}]
    assert waiting == ["c2"]
    assert usage == {"prompt_tokens": 1, "completion_tokens": 2}


def test_conversations_outlive_the_page(scripts):
    script = """
    const kept = new Map();
    const storage = { getItem: (key) => kept.get(key) ?? null, setItem: (key, value) => kept.set(key, value) };
    const first = new conversations.Conversations(storage, () => 5);
    first.current.messages.push({ role: "user", content: "A fox" });
    const stored = first.save();
    first.create();
    const again = new conversations.Conversations(storage);
    const titles = again.list.map((one) => one.title);
    again.remove(again.current.id);
    const forbidden = { getItem() { throw new Error("no"); }, setItem() { throw new Error("no"); } };
    answer = [stored, titles, again.list.map((one) => one.title), new conversations.Conversations(forbidden).save()];
    """
    assert run(scripts, script) == [True, ["A fox"], ["New conversation"], False]


def test_a_full_browser_keeps_the_newest_conversations(scripts):
    """Without the probabilities of tokens."""
    script = """
    let kept = null;
    const setItem = (_, value) => { if (value.length > 600) throw new Error("full"); kept = value; };
    const made = new conversations.Conversations({ getItem: () => null, setItem });
    for (let number = 0; number < 8; number++) {
      made.create();
      made.current.messages.push({ role: "user", content: `${number}`.repeat(50), tokens: [{ token: "x" }] });
      made.save();
    }
    answer = [made.list.length, JSON.parse(kept).map((one) => one.title[0]), kept.includes("token")];
    """
    assert run(scripts, script) == [9, ["7", "6"], False]


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash on this machine")
def test_curl_sends_the_body_and_no_key(scripts):
    body = {"messages": [{"role": "user", "content": 'it\'s "so" $HOME `x` \\ \n'}]}
    command = run(scripts, 'answer = conversations.curl("http://host/v1/chat/completions", given);', body)
    stand_in = f'curl() {{ printf "%s" "${{@: -1}}"; }}\nQUIRE_KEY=secret\n{command}'
    done = subprocess.run(["bash", "-c", stand_in], capture_output=True, text=True, timeout=10, check=True)
    assert json.loads(done.stdout) == body
    assert "$QUIRE_KEY" in command
