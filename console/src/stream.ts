// Server-sent events over fetch, because EventSource cannot send the key. Resumes after the last id that it has seen.
import { ApiError, request, type Params } from "./api";

export interface Message {
  id: string;
  event: string;
  data: string;
}

/** Cuts a text stream into messages, as in the HTML standard, as far as the gateway uses it. */
export class Parser {
  private rest = "";
  private id = "";
  private event = "";
  private data: string[] = [];

  /** The last id, also of messages without data: where to resume. */
  last = "";

  feed(chunk: string): Message[] {
    const lines = (this.rest + chunk).split(/\r\n|\n/);
    this.rest = lines.pop()!;
    const found: Message[] = [];
    for (const line of lines) {
      const message = this.line(line);
      if (message) found.push(message);
    }
    return found;
  }

  private line(line: string): Message | null {
    if (line === "") return this.dispatch();
    const colon = line.indexOf(":");
    const field = colon < 0 ? line : line.slice(0, colon);
    const value = colon < 0 ? "" : line.slice(colon + 1).replace(/^ /, "");
    if (field === "id") this.id = value;
    else if (field === "event") this.event = value;
    else if (field === "data") this.data.push(value);
    return null;
  }

  private dispatch(): Message | null {
    this.last = this.id || this.last;
    const message = this.data.length ? { id: this.id, event: this.event || "message", data: this.data.join("\n") } : null;
    this.event = "";
    this.data = [];
    return message;
  }
}

export type State = "connecting" | "live" | "waiting" | "ended";

/** Reads a stream until `signal` aborts, again and again. `receive` gets each read's messages together. */
export async function watch(
  path: string,
  params: Params,
  signal: AbortSignal,
  receive: (messages: Message[]) => void,
  state: (state: State) => void = () => {},
): Promise<void> {
  let last = "";
  let pause = 500;
  while (!signal.aborted) {
    state("connecting");
    try {
      const headers: Record<string, string> = last ? { "Last-Event-ID": last } : {};
      const response = await request(path, params, { headers, signal });
      state("live");
      const parser = new Parser();
      parser.last = last;
      const reader = response.body!.pipeThrough(new TextDecoderStream()).getReader();
      for (let part = await reader.read(); !part.done; part = await reader.read()) {
        const messages = parser.feed(part.value);
        last = parser.last;
        pause = 500;
        if (messages.length) receive(messages);
      }
    } catch (error) {
      if (signal.aborted) break;
      // Refused for good: a key is needed, or this gateway has no such stream.
      if (error instanceof ApiError && error.status < 500 && error.status !== 429) return state("ended");
    }
    state("waiting");
    await new Promise((wake) => setTimeout(wake, pause));
    pause = Math.min(pause * 2, 10_000);
  }
  state("ended");
}
