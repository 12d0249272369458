// The relay's end inside the sandbox, for images that have Node and no Python. No dependencies. See frames.py for the frames.
"use strict";
const net = require("net");
const fs = require("fs");
const CREDIT = 512 * 1024;
const CHUNK = 64 * 1024;
const FREED = 16 * 1024 * 1024;
const LINES = process.argv.includes("lines");
const place = process.argv.find((word) => word.startsWith("unix:"));  // instead of stdin and stdout
const files = process.argv.find((word) => word.startsWith("files:"));  // a pair of files: see relay.py and filepair.py
const pipe = place ? net.connect(place.slice(5)) : files ? filePair(files.slice(6)) : null;
const input = pipe || process.stdin;
const output = pipe || process.stdout;
const peers = new Map();
let nextAccepted = 0x80000001;

function filePair(dir) {
  const source = fs.openSync(`${dir}/in`, "r"), target = fs.openSync(`${dir}/out`, "a");
  const { O_WRONLY, O_NONBLOCK } = fs.constants;
  let heard = () => {}, ended = () => {}, rung = false, offset = 0, told = 0;
  const ring = () => {
    rung = false;
    try {
      const bell = fs.openSync(`${dir}/bell`, O_WRONLY | O_NONBLOCK);
      try { fs.writeSync(bell, "\n"); } finally { fs.closeSync(bell); }
    } catch { /* there is no listener now; the next one looks at the file first */ }
  };
  const tellTaken = () => {
    told = offset;
    try {
      fs.writeFileSync(`${dir}/taken.new`, `${offset}\n`);
      fs.renameSync(`${dir}/taken.new`, `${dir}/taken`);
    } catch { /* the disk is full, or the host has gone */ }
  };
  const look = () => {
    const chunk = Buffer.alloc(CHUNK);
    for (let n; (n = fs.readSync(source, chunk, 0, CHUNK, offset)) > 0; offset += n) heard(Buffer.from(chunk.subarray(0, n)));
    if (offset - told >= FREED) tellTaken();
    if (!fs.existsSync(`${dir}/in`)) ended();
  };
  const beat = () => {
    let age = Infinity;
    try { age = Date.now() - fs.statSync(`${dir}/alive`).mtimeMs; } catch { /* the directory is gone */ }
    if (age > 120e3) return ended();
    ring();
    look();
  };
  fs.watch(dir, look);
  setInterval(beat, 5000);
  return {
    on(what, then) { if (what === "data") { heard = then; setImmediate(look); } else ended = then; },
    write(data) {
      for (let view = Buffer.from(data); view.length; ) view = view.subarray(fs.writeSync(target, view));
      if (!rung) { rung = true; setImmediate(ring); }
      return true;
    },
  };
}

function send(kind, stream, payload = Buffer.alloc(0)) {
  const head = Buffer.alloc(9);
  head.write(kind, 0, "latin1");
  head.writeUInt32BE(stream, 1);
  head.writeUInt32BE(payload.length, 5);
  const frame = Buffer.concat([head, payload]);
  return output.write(LINES ? frame.toString("base64") + "\n" : frame);
}

function run(stream, socket) {
  const peer = { socket, credit: CREDIT, pending: [], ended: false };
  peers.set(stream, peer);
  const flush = () => {
    while (peer.pending.length && peer.credit > 0) {
      const room = Math.min(CHUNK, peer.credit);
      let data = peer.pending[0];
      if (data.length > room) {
        peer.pending[0] = data.subarray(room);
        data = data.subarray(0, room);
      } else peer.pending.shift();
      peer.credit -= data.length;
      send("P", stream, data);
    }
    if (peer.pending.length) socket.pause();
    else {
      socket.resume();
      if (peer.ended) send("E", stream);
    }
  };
  peer.window = (n) => { peer.credit += n; flush(); };
  socket.on("data", (data) => { peer.pending.push(data); flush(); });
  socket.on("end", () => { peer.ended = true; if (!peer.pending.length) send("E", stream); });
  socket.on("error", (error) => { peer.why = error.message; });
  socket.on("close", () => { peers.delete(stream); send("X", stream, Buffer.from(peer.why || "")); });
}

function listen(listener, port) {
  const server = net.createServer({ allowHalfOpen: true }, (socket) => {
    const stream = nextAccepted++;
    send("O", stream, Buffer.from(String(listener)));
    run(stream, socket);
  });
  server.on("error", (error) => send("X", listener, Buffer.from(error.message)));
  server.listen(port, "127.0.0.1", () => send("B", listener, Buffer.from(String(server.address().port))));
}

function dial(stream, port) {
  const socket = net.connect({ port, host: "127.0.0.1", allowHalfOpen: true });
  const refused = (error) => send("X", stream, Buffer.from(error.message));
  socket.once("error", refused);
  socket.once("connect", () => { socket.removeListener("error", refused); send("O", stream); run(stream, socket); });
}

function take(kind, stream, payload) {
  if (kind === "L") return listen(stream, Number(payload));
  if (kind === "D") return dial(stream, Number(payload));
  const peer = peers.get(stream);
  if (!peer) return;
  if (kind === "W") peer.window(Number(payload));
  else if (kind === "P") peer.socket.write(payload, () => send("W", stream, Buffer.from(String(payload.length))));
  else if (kind === "E") peer.socket.end();
  else if (kind === "X") peer.socket.destroy();
}

let buffer = Buffer.alloc(0);
function parse(frame) { take(frame.toString("latin1", 0, 1), frame.readUInt32BE(1), frame.subarray(9)); }
input.on("data", (data) => {
  buffer = Buffer.concat([buffer, data]);
  if (LINES) {
    for (let end; (end = buffer.indexOf(10)) >= 0; buffer = buffer.subarray(end + 1)) {
      const line = buffer.toString("latin1", 0, end).trim();
      if (line) parse(Buffer.from(line, "base64"));
    }
    return;
  }
  while (buffer.length >= 9 && buffer.length >= 9 + buffer.readUInt32BE(5)) {
    const size = 9 + buffer.readUInt32BE(5);
    parse(buffer.subarray(0, size));
    buffer = buffer.subarray(size);
  }
});
input.on("end", () => process.exit(0));
send("H", 0, Buffer.from("1"));
