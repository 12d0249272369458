// http_probe.py for a sandbox that has node and no python3.
const asked = JSON.parse(require("fs").readFileSync(0, "utf8"));
const say = (status, data) => process.stdout.write(Buffer.concat([Buffer.from(status + "\n"), Buffer.from(data)]), () => process.exit(0));
const made = new URL(asked.url);
const client = require(made.protocol === "https:" ? "https" : "http");
const request = client.request(made, { method: asked.method, headers: asked.headers, timeout: asked.limit_s * 1000 }, (answer) => {
  const parts = [];
  answer.on("data", (part) => parts.push(part));
  answer.on("end", () => (answer.complete ? say(answer.statusCode, Buffer.concat(parts).subarray(0, 65536)) : say(0, "the answer was cut")));
  answer.on("error", (error) => say(0, String(error)));
});
request.on("timeout", () => request.destroy(new Error("timed out")));
request.on("error", (error) => say(0, String(error)));
request.end(asked.body || undefined);
