/** Tokens as lines of a fixed width, so that a view of any length has rows of one height and draws only those in sight.
 *
 * Pure. A line is a heading or a run of text pieces; a piece is one token, or the part of it that is on this line. Each token of the
 * segments has at least one piece, so that each can be pointed at: what has no text of its own is shown as a sign.
 */

import type { Segment } from "./tree";

export interface Piece {
  token: number;
  text: string;
  /** Columns before it on its line. */
  column: number;
}

export interface TextLine {
  kind: "text";
  indent: number;
  pieces: Piece[];
}

export interface HeadLine {
  kind: "head";
  indent: number;
  /** The first token under it. */
  token: number;
  /** Which section it begins; its text belongs to the view. */
  section: number;
}

export type Line = TextLine | HeadLine;

export interface Section {
  segments: Segment[];
  indent: number;
  /** Tokens that are not shown: the marks of the template, where a heading repeats them. */
  hidden?: (token: number) => boolean;
}

const NEWLINE = "↵";
const NO_TEXT = "·";
/** A line is broken at a space, if one is in its last few columns. */
const LOOK_BACK = 18;

const CONTROL = /[\u0000-\u0008\u000b-\u001f\u007f]/g;
/** Not the joiners of emoji and of scripts, U+200C and U+200D. */
const INVISIBLE = /[\u00ad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]|[\u{e0000}-\u{e007f}]/gu;
const WIDE = /[\u1100-\u115f\u2e80-\ua4cf\uac00-\ud7a3\uf900-\ufaff\ufe30-\ufe6f\uff00-\uff60\uffe0-\uffe6]|\p{Extended_Pictographic}/u;
const ASCII = /^[\x20-\x7e]*$/;

/** Text whose invisible characters, and those that turn the direction of what follows, are marks: "⟨U+202E⟩". */
export function visible(text: string): string {
  return ASCII.test(text) ? text : text.replace(INVISIBLE, (c) => `⟨U+${c.codePointAt(0)!.toString(16).toUpperCase().padStart(4, "0")}⟩`);
}

/** A token's text as it is shown: control characters as their pictures, a tabulator as an arrow. */
export function shown(text: string): string {
  if (text === "") return NO_TEXT;
  if (ASCII.test(text)) return text;
  return visible(text).replace(/\t/g, "⇥ ").replace(CONTROL, (c) => (c === "\x7f" ? "\u2421" : String.fromCharCode(0x2400 + c.charCodeAt(0))));
}

/** Columns that a text takes in a font of one width. */
export function widthOf(text: string): number {
  if (ASCII.test(text)) return text.length;
  let width = 0;
  for (const character of text) width += WIDE.test(character) ? 2 : /\p{Mark}/u.test(character) ? 0 : 1;
  return width;
}

export function linesOf(texts: readonly string[], sections: readonly Section[], columns: number): Line[] {
  const lines: Line[] = [];
  sections.forEach((section, i) => {
    const first = section.segments[0]?.from ?? 0;
    lines.push({ kind: "head", indent: section.indent, token: first, section: i });
    const filler = new Filler(lines, section.indent, Math.max(columns - section.indent * 2, 16));
    for (const { from, to } of section.segments) {
      for (let token = from; token < to; token++) {
        if (!section.hidden?.(token)) filler.add(token, texts[token]!);
      }
    }
    filler.end();
  });
  return lines;
}

class Filler {
  private pieces: Piece[] = [];
  private width = 0;

  constructor(
    private readonly lines: Line[],
    private readonly indent: number,
    private readonly columns: number,
  ) {}

  add(token: number, text: string): void {
    const parts = text.split("\n");
    parts.forEach((part, i) => {
      const last = i === parts.length - 1;
      if (last && part === "" && parts.length > 1) return;
      this.put(token, shown(part === "" && !last ? NEWLINE : last ? part : part + NEWLINE));
      if (!last) this.end();
    });
  }

  end(): void {
    if (this.pieces.length) this.lines.push({ kind: "text", indent: this.indent, pieces: this.pieces });
    this.pieces = [];
    this.width = 0;
  }

  private put(token: number, text: string): void {
    const width = widthOf(text);
    if (this.width + width > this.columns && this.pieces.length) this.wrap(text);
    if (width <= this.columns) return this.push(token, text, width);
    for (const part of cut(text, this.columns)) {
      if (this.pieces.length) this.end();
      this.push(token, part, widthOf(part));
    }
  }

  /** Begins a line; the beginning of a word that goes on in `next` comes along. */
  private wrap(next: string): void {
    let from = this.pieces.length;
    if (!/^\s/.test(next)) {
      for (let i = from - 1; i > 0 && this.width - this.pieces[i]!.column <= LOOK_BACK; i--) {
        if (/^\s/.test(this.pieces[i]!.text) || /\s$/.test(this.pieces[i - 1]!.text)) {
          from = i;
          break;
        }
      }
    }
    const along = this.pieces.splice(from);
    this.end();
    for (const piece of along) this.push(piece.token, piece.text, widthOf(piece.text));
  }

  private push(token: number, text: string, width: number): void {
    this.pieces.push({ token, text, column: this.width });
    this.width += width;
  }
}

function cut(text: string, columns: number): string[] {
  const parts: string[] = [];
  let part = "";
  let width = 0;
  for (const character of text) {
    const more = widthOf(character);
    if (width + more > columns) {
      parts.push(part);
      part = "";
      width = 0;
    }
    part += character;
    width += more;
  }
  return part ? [...parts, part] : parts;
}

/** The place of each token in the lines: its first piece. Tokens that are hidden are at none. */
export class Places {
  private readonly lineOf = new Map<number, number>();
  /** The tokens in the order in which they are shown; of those that are shown twice, each time. */
  private readonly order: number[] = [];

  constructor(private readonly lines: readonly Line[]) {
    lines.forEach((line, i) => {
      if (line.kind === "head") return;
      for (const { token } of line.pieces) {
        if (this.lineOf.has(token)) continue;
        this.lineOf.set(token, i);
        this.order.push(token);
      }
    });
  }

  get first(): number {
    return this.order[0] ?? -1;
  }

  get last(): number {
    return this.order[this.order.length - 1] ?? -1;
  }

  line(token: number): number {
    return this.lineOf.get(token) ?? -1;
  }

  /** The token `by` further on; at most the first or last one. */
  step(token: number, by: number): number {
    const at = this.order.indexOf(token);
    return this.order[Math.min(Math.max(at + by, 0), this.order.length - 1)] ?? -1;
  }

  /** The token under (`by` > 0) or above one, `by` lines of text away. */
  vertical(token: number, by: number): number {
    let at = this.line(token);
    if (at < 0) return this.first;
    const here = this.lines[at] as TextLine;
    const column = here.pieces.find((piece) => piece.token === token)!.column;
    const way = Math.sign(by);
    let found = here;
    for (let left = Math.abs(by); left > 0; left--) {
      do at += way;
      while (this.lines[at]?.kind === "head");
      const next = this.lines[at];
      if (!next || next.kind === "head") break;
      found = next;
    }
    return nearest(found, column);
  }

  /** The first token after (`by` > 0) or the last one before a token of which `wanted` holds; the token itself, if there is none. */
  find(token: number, by: number, wanted: (token: number) => boolean): number {
    for (let at = this.order.indexOf(token) + by; at >= 0 && at < this.order.length; at += by) {
      if (wanted(this.order[at]!)) return this.order[at]!;
    }
    return token;
  }
}

function nearest(line: TextLine, column: number): number {
  let found = line.pieces[0]!;
  for (const piece of line.pieces) if (piece.column <= column) found = piece;
  return found.token;
}
