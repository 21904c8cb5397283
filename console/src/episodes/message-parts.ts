/** A message's text as the parts that people read: prose, reasoning, tool calls, JSON. Pure. */

export interface Part {
  kind: "text" | "reasoning" | "call" | "json" | "tools";
  text: string;
  /** The tool that a call names. */
  name?: string;
}

/** The JSON of a text that is an object or a list, indented; null: it is something else. */
function indented(text: string): string | null {
  if (!/^\s*[[{]/.test(text)) return null;
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return null;
  }
}

const plain = (text: string): Part[] => {
  const json = indented(text);
  const trimmed = text.trim();
  return json !== null ? [{ kind: "json", text: json }] : trimmed ? [{ kind: "text", text: trimmed }] : [];
};

/** A call as templates write it: an object with name and arguments (Qwen, Hermes), or tags (Qwen3-Coder). */
function callOf(text: string): Part {
  const tag = /^\s*<function=([^>\s]+)>\n?([^]*?)(<\/function>\s*)?$/.exec(text);
  if (tag) return { kind: "call", name: tag[1]!, text: tag[2]!.trim() };
  try {
    const { name, arguments: given, parameters } = JSON.parse(text) as Record<string, unknown>;
    if (typeof name === "string") {
      const body = given ?? parameters ?? {};
      return { kind: "call", name, text: typeof body === "string" ? (indented(body) ?? body) : JSON.stringify(body, null, 2) };
    }
  } catch {
    // a call that no parser understood is what people look for here
  }
  return { kind: "call", name: "", text: text.trim() };
}

const BLOCKS: [tag: string, part: (text: string) => Part[]][] = [
  ["think", (text) => (text.trim() ? [{ kind: "reasoning", text: text.trim() }] : [])],
  ["tool_call", (text) => [callOf(text)]],
  ["tool_response", plain],
  ["tools", (text) => [{ kind: "tools", text: text.trim() }]],
];
const BLOCK = new RegExp(`<(${BLOCKS.map(([tag]) => tag).join("|")})>([^]*?)(?:</\\1>|$)`, "g");

export function partsOf(text: string): Part[] {
  const parts: Part[] = [];
  let at = 0;
  for (const found of text.matchAll(BLOCK)) {
    const [whole, tag, body] = found as unknown as [string, string, string];
    parts.push(...plain(text.slice(at, found.index)), ...BLOCKS.find(([name]) => name === tag)![1](body));
    at = found.index + whole.length;
  }
  return [...parts, ...plain(text.slice(at))];
}

const LONG = { lines: 16, characters: 1_500 };

/** The line that stands for a part until it is opened; null: the part is short and stands open. */
export function foldedAs(part: Part): string | null {
  const lines = part.text.split("\n").length;
  const always = part.kind === "reasoning" || part.kind === "tools";
  if (!always && lines <= LONG.lines && part.text.length <= LONG.characters) return null;
  const name = { text: "", reasoning: "reasoning", call: "", json: "JSON", tools: "tools" }[part.kind];
  const size = `${part.text.length.toLocaleString("en-US")} characters`;
  const begin = part.kind === "text" ? `${part.text.slice(0, 120).split("\n")[0]}… ` : "";
  return begin ? `${begin}(${size})` : [name, size].filter(Boolean).join(", ");
}
