// A trainer in another language: one batch of GRPO through `rollyard serve rollouts`, by HTTP alone.
// It answers held calls with token ids, reads rows, computes advantages over the group, publishes the next version.
const [url, key] = process.argv.slice(2);
const headers = { "content-type": "application/json", authorization: `Bearer ${key}` };

async function ask(method, path, body, more = {}) {
  const answer = await fetch(url + path, { method, headers: { ...headers, ...more }, body: body && JSON.stringify(body) });
  const found = await answer.json();
  if (!answer.ok) throw new Error(`${method} ${path}: ${answer.status} ${found.error.code}: ${found.error.message}`);
  return found;
}

const bytes = (text) => [...new TextEncoder().encode(text)];
const END = 261; // of a message, in the server's renderer of bytes

// Half of the answers solve the task: by the order in which first calls come.
let firsts = 0;
const chosen = new Map();
function answerTo(call) {
  if (!chosen.has(call.session_id)) chosen.set(call.session_id, firsts++ % 2 === 0);
  const called = call.messages.some((message) => message.role === "tool");
  const wanted = { name: "shell", arguments: { command: chosen.get(call.session_id) ? "echo hello > out.txt" : "true" } };
  return called ? "done" : `<tool_call>\n${JSON.stringify(wanted)}\n</tool_call>`;
}

await ask("POST", "/v1/policy_version", { version: 7 });
const tasks = [{ id: "hello", instruction: "write hello to out.txt", verify: ["test -f out.txt"] }];
const job = await ask("POST", "/v1/jobs", { tasks, attempts: 4 }, { "idempotency-key": "batch-1" });
const again = await ask("POST", "/v1/jobs", { tasks, attempts: 4 }, { "idempotency-key": "batch-1" });
if (again.id !== job.id) throw new Error("the same request made another job");

let answered = 0;
for (;;) {
  const { calls } = await ask("GET", "/v1/calls?wait=2");
  for (const call of calls) {
    const ids = [...bytes(answerTo(call)), END];
    await ask("POST", `/v1/calls/${call.call_id}/reply`, { ids, logprobs: ids.map(() => -0.25), version: 7 });
    answered += 1;
  }
  const { state } = await ask("GET", `/v1/jobs/${job.id}`);
  if (state === "done") break;
  if (state !== "queued" && state !== "running") throw new Error(`the job ended as ${state}`);
}

const { rows, left_out } = await ask("GET", `/v1/jobs/${job.id}/rows?format=samples`);
const mean = rows.reduce((sum, row) => sum + row.reward, 0) / rows.length;
const advantages = rows.map((row) => row.reward - mean);
const trained = rows.map((row) => row.loss_mask.reduce((sum, bit) => sum + bit, 0));
const versions = [...new Set(rows.flatMap((row) => row.versions.filter((_, n) => row.loss_mask[n])))];
const logprobs = [...new Set(rows.flatMap((row) => row.logprobs.filter((_, n) => row.loss_mask[n])))];
await ask("POST", "/v1/policy_version", { version: 8 });
const { policy_version } = await ask("GET", "/v1/policy_version");
console.log(JSON.stringify({ job: job.id, answered, rows: rows.length, left_out, mean, advantages, trained, versions, logprobs, policy_version }));
