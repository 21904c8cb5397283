// Rows of one height, of which only those in sight exist. The length is given and not measured, so a list of 100,000 costs as one of 50.
import type { ComponentChildren } from "preact";
import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";

/** The window of rows moves in steps of this many, so most scrolling draws nothing. At most `over`, or rows in sight would be missing. */
const STEP = 5;

interface Props {
  label: string;
  length: number;
  rowHeight: number;
  /** The cells of a row, each with role="gridcell" (or role="rowheader"). It may show a placeholder until its page has come. */
  row: (index: number) => ComponentChildren;
  /** Cells of the head, each with role="columnheader". */
  head?: ComponentChildren;
  /** Rows beyond the sight that are kept. */
  over?: number;
  /** Called with the rows that are in sight, from first to last: for paging. */
  seen?: (first: number, last: number) => void;
  /** The chosen row, moved by the arrow keys; -1: none. */
  chosen?: number;
  choose?: (index: number) => void;
  /** Enter, or a double click. */
  open?: (index: number) => void;
  class?: string;
}

export function VirtualList(props: Props) {
  const { label, length, rowHeight, row, head, over = 10, seen, chosen = -1, choose, open } = props;
  const box = useRef<HTMLDivElement>(null);
  const [{ top, height }, setSight] = useState({ top: 0, height: 600 });
  const [id] = useState(() => `list-${Math.random().toString(36).slice(2, 8)}`);
  const first = Math.max(0, Math.min(length, Math.floor(top / rowHeight)) - over);
  const last = Math.min(length, Math.ceil((top + height) / rowHeight) + over);

  useLayoutEffect(() => {
    const element = box.current!;
    const step = STEP * rowHeight;
    const look = () => {
      const [top, height] = [Math.floor(element.scrollTop / step) * step, element.clientHeight];
      setSight((before) => (before.top === top && before.height === height ? before : { top, height }));
    };
    look();
    const watch = new ResizeObserver(look);
    watch.observe(element);
    element.addEventListener("scroll", look, { passive: true });
    return () => {
      watch.disconnect();
      element.removeEventListener("scroll", look);
    };
  }, []);
  useEffect(() => seen?.(first, last), [first, last, length]);
  useEffect(() => {
    const element = box.current!;
    if (chosen < 0) return;
    const headHeight = head ? rowHeight : 0;
    const from = chosen * rowHeight;
    if (from < element.scrollTop) element.scrollTop = from;
    else if (from + rowHeight + headHeight > element.scrollTop + element.clientHeight)
      element.scrollTop = from + rowHeight + headHeight - element.clientHeight;
  }, [chosen]);

  const keyDown = (event: KeyboardEvent) => {
    const page = Math.max(1, Math.floor(height / rowHeight) - 1);
    const steps: Record<string, number> = { ArrowDown: 1, j: 1, ArrowUp: -1, k: -1, PageDown: page, PageUp: -page, Home: -length, End: length };
    const step = steps[event.key];
    if (event.target !== box.current || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "Enter" && chosen >= 0) open?.(chosen);
    else if (step !== undefined && choose && length) choose(Math.max(0, Math.min(length - 1, chosen + step)));
    else return;
    event.preventDefault();
  };
  const indices = Array.from({ length: Math.max(0, last - first) }, (_, i) => first + i);
  return (
    <div
      ref={box}
      class={`virtual ${props.class ?? ""}`}
      role="grid"
      aria-label={label}
      aria-rowcount={length + (head ? 1 : 0)}
      aria-activedescendant={chosen >= first && chosen < last ? `${id}-${chosen}` : undefined}
      tabIndex={0}
      onKeyDown={keyDown}
    >
      {head && (
        <div role="row" aria-rowindex={1} class="virtual-row virtual-head" style={{ height: `${rowHeight}px` }}>
          {head}
        </div>
      )}
      <div role="rowgroup" class="virtual-space" style={{ height: `${length * rowHeight}px` }}>
        {indices.map((index) => (
          <div
            key={index}
            id={`${id}-${index}`}
            role="row"
            aria-rowindex={index + (head ? 2 : 1)}
            aria-selected={index === chosen}
            class={index === chosen ? "virtual-row chosen" : "virtual-row"}
            style={{ height: `${rowHeight}px`, transform: `translateY(${index * rowHeight}px)` }}
            onClick={() => choose?.(index)}
            onDblClick={() => open?.(index)}
          >
            {row(index)}
          </div>
        ))}
      </div>
    </div>
  );
}
