/** One line of tokens. It is drawn again only when its own look changes, so scrolling draws the lines that come into sight alone.
 *
 * Tokens of one color that stand together are one run of text: few elements, and text that can be selected as it stands.
 */

import { Component } from "preact";
import type { TextLine } from "./lines";
import type { Coloring } from "./scale";

interface Props {
  index: number;
  line: TextLine;
  coloring: Coloring;
  /** The token that is pointed at; -1: it is on another line. */
  current: number;
  height: number;
  isPrompt: (token: number) => boolean;
}

interface Run {
  cls: string;
  text: string;
  /** Its first piece. */
  piece: number;
}

export function runsOf(line: TextLine, clsOf: (token: number) => string): Run[] {
  const runs: Run[] = [];
  line.pieces.forEach(({ token, text }, piece) => {
    const cls = clsOf(token);
    const last = runs[runs.length - 1];
    if (last && last.cls === cls) last.text += text;
    else runs.push({ cls, text, piece });
  });
  return runs;
}

export class TokenLine extends Component<Props> {
  override shouldComponentUpdate(next: Readonly<Props>): boolean {
    const now = this.props;
    return next.line !== now.line || next.coloring !== now.coloring || next.current !== now.current || next.index !== now.index;
  }

  override render({ index, line, coloring, current, height, isPrompt }: Props) {
    const clsOf = (token: number) => {
      const cls = isPrompt(token) ? "prompt" : coloring.cls(token);
      return token === current ? `${cls} now` : cls;
    };
    return (
      <div class="token-line" data-line={index} style={{ height: `${height}px`, paddingLeft: `${line.indent * 2}ch` }}>
        {runsOf(line, clsOf).map((run) => (
          <span key={run.piece} class={run.cls} data-piece={run.piece}>
            {run.text}
          </span>
        ))}
      </div>
    );
  }
}

/** The token at a point of the screen, in a view whose lines are these; -1: there is none. */
export function tokenAt(x: number, y: number, target: EventTarget | null, lines: readonly { kind: string }[]): number {
  const span = (target as HTMLElement | null)?.closest?.<HTMLElement>("[data-piece]");
  const element = span?.closest<HTMLElement>("[data-line]");
  if (!span || !element) return -1;
  const line = lines[Number(element.dataset.line)] as TextLine | undefined;
  if (line?.kind !== "text") return -1;
  let rest = offsetAt(span, x, y);
  for (let piece = Number(span.dataset.piece); piece < line.pieces.length; piece++) {
    const { token, text } = line.pieces[piece]!;
    if (rest < text.length) return token;
    rest -= text.length;
  }
  return line.pieces[Number(span.dataset.piece)]?.token ?? -1;
}

type Caret = { node: Node; offset: number };

function caretAt(x: number, y: number): Caret | null {
  if (document.caretPositionFromPoint) {
    const found = document.caretPositionFromPoint(x, y);
    return found && { node: found.offsetNode, offset: found.offset };
  }
  const found = document.caretRangeFromPoint?.(x, y);
  return found ? { node: found.startContainer, offset: found.startOffset } : null;
}

/** The place of the character under a point. A caret stands between two characters: the one before it may be under the point. */
function offsetAt(span: HTMLElement, x: number, y: number): number {
  const caret = caretAt(x, y);
  if (!caret || !span.contains(caret.node) || caret.node.nodeType !== Node.TEXT_NODE) return 0;
  if (caret.offset === 0) return 0;
  const range = document.createRange();
  range.setStart(caret.node, caret.offset);
  return range.getBoundingClientRect().left > x ? caret.offset - 1 : caret.offset;
}
