"""A model server. It batches waiting prompts, and streams each token as a line of JSON.

python examples/model_server.py MODEL [DEVICE] [PORT]    # MODEL: a folder, or a name on the Hugging Face hub
curl -N --json '{"prompt": "Once upon a time", "tokens": 50}' localhost:8000/generate
"""

import asyncio
import json
import logging
import sys
from contextlib import suppress

from aiohttp import web
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.generation.streamers import BaseStreamer

import djinn  # noqa: F401 - makes the device known

BATCH = 16  # prompts
log = logging.getLogger(__name__)


class Batch(BaseStreamer):
    """Prompts of one batch, as (text, number of tokens, callback). The callback gets each token, and None at the end."""

    def __init__(self, prompts):
        self.prompts, self.left, self.eos = prompts, None, ()

    def put(self, tokens):
        """Take the tokens of a step. The first call brings the prompts."""
        if self.left is None:
            self.left = [length for _, length, _ in self.prompts]
            return
        for n, ((_, _, send), token) in enumerate(zip(self.prompts, tokens.tolist(), strict=True)):
            if self.left[n]:
                send(token)
                self.left[n] = 0 if token in self.eos else self.left[n] - 1
                if not self.left[n]:
                    send(None)

    def end(self):
        for _, _, send in self.prompts:
            send(None)

    def run(self, model, tokenizer):
        texts, lengths, _ = zip(*self.prompts, strict=True)
        eos = model.generation_config.eos_token_id
        self.eos = eos if isinstance(eos, list) else [eos]
        inputs = tokenizer(list(texts), return_tensors="pt", padding=True, padding_side="left").to(model.device)
        model.generate(**inputs, streamer=self, max_new_tokens=max(lengths), do_sample=False)


async def read(request, tokenizer, limit):
    """Return the prompt and the number of tokens of a request."""
    if request.content_type != "application/json":
        raise web.HTTPUnsupportedMediaType(text="send Content-Type: application/json\n")
    with suppress(TypeError, ValueError):  # no JSON, or no Unicode
        match await request.json():
            case {"prompt": str(prompt), "tokens": int(tokens)} if 0 < tokens <= limit:
                if 0 < len(tokenizer(prompt).input_ids) <= limit:
                    return prompt, tokens
    raise web.HTTPBadRequest(text=f'send {{"prompt": TEXT, "tokens": NUMBER}}, each of 1 to {limit} tokens\n')


async def serve(model, tokenizer, port):
    """Serve on localhost until the task is cancelled."""
    waiting, loop = asyncio.Queue(), asyncio.get_running_loop()
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", 8192) // 2  # any two fit into a batch

    async def generate(request):
        asked, tokens, response = await read(request, tokenizer, limit), asyncio.Queue(), web.StreamResponse()
        await response.prepare(request)
        await waiting.put((*asked, lambda token: loop.call_soon_threadsafe(tokens.put_nowait, token)))
        while (token := await tokens.get()) is not None:
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
            batch = Batch([await waiting.get()])
            while len(batch.prompts) < BATCH and not waiting.empty():
                batch.prompts.append(waiting.get_nowait())
            try:
                await asyncio.to_thread(batch.run, model, tokenizer)
            except Exception:
                log.exception("a batch of %d prompts failed", len(batch.prompts))
                batch.end()
    finally:
        await runner.cleanup()


if __name__ == "__main__":
    name, device, port = [*sys.argv[1:], *("", "remote_accelerator:0", "8000")[len(sys.argv) - 1 :]]
    model = AutoModelForCausalLM.from_pretrained(name).eval().to(device)
    asyncio.run(serve(model, AutoTokenizer.from_pretrained(name), int(port)))
