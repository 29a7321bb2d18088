"""A model server: it batches the prompts that wait, and streams each token as a line of JSON.

python examples/model_server.py MODEL [DEVICE] [PORT]    # MODEL: a folder, or a name on the Hugging Face hub
curl -N localhost:8000/generate -d '{"prompt": "Once upon a time", "tokens": 50}'
"""

import asyncio
import json
import sys

from aiohttp import web
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.generation.streamers import BaseStreamer

import djinn  # noqa: F401 - makes the device known

BATCH = 16  # prompts


class Batch(BaseStreamer):
    """Prompts that are generated together, each as (text, number of tokens, callback for its tokens)."""

    def __init__(self, prompts):
        self.prompts, self.steps = prompts, -1

    def put(self, tokens):
        """Take the tokens of a step; the first call has the prompts."""
        self.steps += 1
        if self.steps:
            for (_, length, send), token in zip(self.prompts, tokens.tolist(), strict=True):
                if self.steps <= length:
                    send(token)

    def end(self):
        for _, _, send in self.prompts:
            send(None)

    def run(self, model, tokenizer):
        texts, lengths, _ = zip(*self.prompts, strict=True)
        inputs = tokenizer(list(texts), return_tensors="pt", padding=True, padding_side="left").to(model.device)
        model.generate(**inputs, streamer=self, max_new_tokens=max(lengths), do_sample=False)


async def serve(model, tokenizer, port):
    """Serve on localhost until the task is cancelled."""
    waiting, loop = asyncio.Queue(), asyncio.get_running_loop()

    async def generate(request):
        asked, tokens, response = await request.json(), asyncio.Queue(), web.StreamResponse()
        await response.prepare(request)
        await waiting.put((asked["prompt"], asked["tokens"], lambda t: loop.call_soon_threadsafe(tokens.put_nowait, t)))
        for _ in range(asked["tokens"]):
            if (token := await tokens.get()) is None:
                break
            line = {"token": token, "text": tokenizer.decode([token])}
            await response.write(json.dumps(line).encode() + b"\n")
        return response

    app = web.Application()
    app.router.add_post("/generate", generate)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "localhost", port).start()
        while True:
            batch = [await waiting.get()]
            while len(batch) < BATCH and not waiting.empty():
                batch.append(waiting.get_nowait())
            await asyncio.to_thread(Batch(batch).run, model, tokenizer)
    finally:
        await runner.cleanup()


if __name__ == "__main__":
    name, device, port = [*sys.argv[1:], *("", "remote_accelerator:0", "8000")[len(sys.argv) - 1 :]]
    model = AutoModelForCausalLM.from_pretrained(name).eval().to(device)
    asyncio.run(serve(model, AutoTokenizer.from_pretrained(name), int(port)))
