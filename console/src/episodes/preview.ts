/** What a list shows of an episode in a line: the question, the answer, or what went wrong. Pure. */

const USER =
  /<\|im_start\|>user\n|<\|start_header_id\|>user<\|end_header_id\|>|<start_of_turn>user\n|<\|start\|>user<\|message\|>|<｜User｜>|<\|user\|>|\[INST\]/g;
const MARK = /<\|[^|<>]*\|>|<｜[^｜<>]*｜>|<(?:start|end)_of_turn>|\[\/?INST\]/;

const inLine = (text: string) => text.replace(/\s+/g, " ").trim();

/** The last message of the user at the end of a prompt; of a template without known marks, the end itself. */
export function questionOf(prompt: string): string {
  const user = [...prompt.matchAll(USER)].at(-1);
  const text = user ? prompt.slice(user.index + user[0].length).split(MARK)[0]! : prompt.split(MARK).filter(Boolean).join(" ");
  return inLine(text);
}

/** The beginning of a reply, without its reasoning where that has ended. */
export function replyOf(reply: string): string {
  return inLine(reply.replace(/^\s*<think>[^]*?<\/think>/, "").split(MARK).join(" "));
}

/** The last line with text: of a traceback, the error. */
export function lastLine(text: string): string {
  return text.trimEnd().split("\n").at(-1)!.trim();
}
