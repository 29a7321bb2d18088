// Runs Perfetto's trace processor, as its page has it in WebAssembly, for a parent process: requests come on stdin, answers go to
// stdout, each with its length in four bytes (little-endian) before it. Usage: node trace_processor.js FOLDER, which has engine_bundle.js.
const fs = require("fs");
const folder = process.argv[2];
const { stdin, stdout, stderr } = process;
console.log = console.warn = console.error = (...said) => stderr.write(said.join(" ") + "\n");
// The engine expects to be a worker of a page: it is told that it is, and reads its files from the folder.
globalThis.self = globalThis;
globalThis.WorkerGlobalScope = function () {};
globalThis.location = { protocol: "http:", host: "localhost", href: "http://localhost/" };
globalThis.XMLHttpRequest = class {
  open(_, name) {
    this.response = fs.readFileSync(folder + "/" + name.split("/").pop());
  }
  send() {}
};
process.type = "renderer";
(0, eval)(fs.readFileSync(folder + "/engine_bundle.js", "utf8"));
const port = {
  postMessage: (answer) => {
    const head = Buffer.alloc(4);
    head.writeUInt32LE(answer.length);
    stdout.write(Buffer.concat([head, Buffer.from(answer)]));
  },
};
globalThis.onmessage({ data: port });
let waiting = Buffer.alloc(0);
stdin.on("data", (data) => {
  waiting = Buffer.concat([waiting, data]);
  while (waiting.length >= 4 && waiting.length >= 4 + waiting.readUInt32LE(0)) {
    const end = 4 + waiting.readUInt32LE(0);
    port.onmessage({ data: new Uint8Array(waiting.subarray(4, end)) });
    waiting = waiting.subarray(end);
  }
});
