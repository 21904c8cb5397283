/** Tokens of any number, colored: a window of lines, one handler for the pointer, arrows for the keyboard.
 *
 * Owns which lines are in sight. What is pointed at belongs to the view that shows its figures (`point`).
 */

import type { ComponentChildren } from "preact";
import { useEffect, useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";
import { linesOf, Places, type Section } from "./lines";
import { windowOf } from "./pages";
import type { Coloring } from "./scale";
import { nodeAt, type TokenTable } from "./table";
import { TokenLine, tokenAt } from "./token-line";

const LINE = 21;
/** Lines around those in sight; the window moves in steps of half as many, so most scrolling draws nothing. */
const AROUND = 24;

interface Props {
  label: string;
  table: TokenTable;
  sections: readonly Section[];
  coloring: Coloring;
  /** The heading of a section. */
  head: (section: number) => ComponentChildren;
  /** The token whose figures are shown; -1: none. */
  current: number;
  point: (token: number, by: "pointer" | "keyboard") => void;
  /** A token to bring into sight; a new object each time. */
  target?: { token: number } | null;
  class?: string;
}

export function TokenView({ label, table, sections, coloring, head, current, point, target, class: cls = "" }: Props) {
  const box = useRef<HTMLDivElement>(null);
  const [columns, setColumns] = useState(0);
  const [[from, to], setSight] = useState<[number, number]>([0, 60]);
  const lines = useMemo(() => (columns ? linesOf(table.texts, sections, columns) : []), [table, sections, columns]);
  const places = useMemo(() => new Places(lines), [lines]);
  const isPrompt = useMemo(() => (token: number) => !nodeAt(table, token).sampled, [table]);
  const turnOf = (token: number) => (isPrompt(token) ? -1 : table.nodeOf[token]!);

  useLayoutEffect(() => {
    const element = box.current!;
    const measure = () => setColumns(columnsOf(element));
    measure();
    const watch = new ResizeObserver(measure);
    watch.observe(element);
    return () => watch.disconnect();
  }, []);
  useLayoutEffect(() => {
    const element = box.current!;
    let frame = 0;
    const look = () => {
      frame = 0;
      const sight = windowOf(element.scrollTop, element.clientHeight, LINE, lines.length, AROUND);
      setSight((before) => (needs(before, element, lines.length) ? sight : before));
    };
    const scrolled = () => (frame ||= requestAnimationFrame(look));
    setSight(windowOf(element.scrollTop, element.clientHeight, LINE, lines.length, AROUND));
    element.addEventListener("scroll", scrolled, { passive: true });
    return () => {
      cancelAnimationFrame(frame);
      element.removeEventListener("scroll", scrolled);
    };
  }, [lines]);
  const show = (token: number) => {
    const line = places.line(token);
    const element = box.current!;
    if (line < 0) return;
    const top = line * LINE;
    if (top < element.scrollTop + LINE) element.scrollTop = top - LINE * 3;
    else if (top + LINE * 2 > element.scrollTop + element.clientHeight) element.scrollTop = top - element.clientHeight + LINE * 4;
  };
  useEffect(() => {
    if (target) show(target.token);
  }, [target, places]);

  const keyDown = (event: KeyboardEvent) => {
    if (event.altKey || event.metaKey) return;
    const here = places.line(current) < 0 ? places.first : current;
    const page = Math.max(Math.floor(box.current!.clientHeight / LINE) - 2, 1);
    const next = stepOf(event, { places, here, page, begun: places.line(current) >= 0, turnOf, marked: (token) => coloring.cls(token) });
    if (next === null || next < 0) return;
    event.preventDefault();
    point(next, "keyboard");
    show(next);
  };
  const pointed = (event: PointerEvent | MouseEvent) => {
    const token = tokenAt(event.clientX, event.clientY, event.target, lines);
    if (token >= 0) point(token, event.type === "click" ? "keyboard" : "pointer");
  };
  const shown = lines.slice(from, to);
  const currentLine = places.line(current);
  return (
    <div
      ref={box}
      class={`token-view ${coloring.mode} ${cls}`}
      role="application"
      aria-label={label}
      aria-roledescription="tokens"
      tabIndex={0}
      style={{ "--height": `${lines.length * LINE + 16}px` }}
      onKeyDown={keyDown}
      onPointerMove={(event) => event.pointerType === "mouse" && !event.buttons && pointed(event)}
      onClick={pointed}
    >
      <div class="token-space" style={{ height: `${lines.length * LINE + 8}px` }}>
        <div class="token-window" style={{ transform: `translateY(${from * LINE}px)` }}>
          {shown.map((line, i) => {
            const index = from + i;
            if (line.kind === "head")
              return (
                <div key={index} class="token-head" style={{ height: `${LINE}px`, paddingLeft: `${line.indent * 2}ch` }}>
                  {head(line.section)}
                </div>
              );
            const near = Math.abs(index - currentLine) < 40 && line.pieces.some((piece) => piece.token === current);
            return <TokenLine key={index} index={index} line={line} coloring={coloring} current={near ? current : -1} height={LINE} isPrompt={isPrompt} />;
          })}
        </div>
      </div>
    </div>
  );
}

/** True if lines in sight, or half of those around, are not drawn. */
function needs([from, to]: [number, number], element: HTMLElement, count: number): boolean {
  const [first, last] = windowOf(element.scrollTop, element.clientHeight, LINE, count, AROUND / 2);
  return first < from || last > to;
}

/** Characters of the view's font that its width holds. */
function columnsOf(element: HTMLElement): number {
  const probe = document.createElement("span");
  probe.className = "token-probe";
  probe.textContent = "0".repeat(100);
  element.append(probe);
  const wide = probe.getBoundingClientRect().width / 100;
  probe.remove();
  const style = getComputedStyle(element);
  const padding = (side: string) => parseFloat(side) || 0;
  const inner = element.clientWidth - padding(style.paddingLeft) - padding(style.paddingRight);
  return Math.max(Math.min(Math.floor(inner / (wide || 8)), 160), 20);
}

interface Here {
  places: Places;
  here: number;
  page: number;
  /** False: nothing is pointed at yet, and the first key points at the first token. */
  begun: boolean;
  turnOf: (token: number) => number;
  marked: (token: number) => string;
}

/** The token that a key leads to; null: the key is not the view's. */
export function stepOf(event: Pick<KeyboardEvent, "key" | "ctrlKey">, at: Here): number | null {
  const { places, here } = at;
  const begin = (token: number) => (at.begun ? token : here);
  switch (event.key) {
    case "ArrowRight":
      return begin(places.step(here, 1));
    case "ArrowLeft":
      return begin(places.step(here, -1));
    case "ArrowDown":
      return begin(places.vertical(here, 1));
    case "ArrowUp":
      return begin(places.vertical(here, -1));
    case "PageDown":
      return begin(places.vertical(here, at.page));
    case "PageUp":
      return begin(places.vertical(here, -at.page));
    case "Home":
      return places.first;
    case "End":
      return places.last;
    case "]":
      return places.find(here, 1, (token) => at.turnOf(token) >= 0 && at.turnOf(token) !== at.turnOf(here));
    case "[":
      return places.find(here, -1, (token) => at.turnOf(token) >= 0 && at.turnOf(token) !== at.turnOf(here));
    case "n":
      return places.find(here, 1, (token) => at.marked(token) !== "" && at.marked(token) !== at.marked(here));
    case "p":
      return places.find(here, -1, (token) => at.marked(token) !== "" && at.marked(token) !== at.marked(here));
    default:
      return null;
  }
}
