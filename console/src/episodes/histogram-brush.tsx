/** Episodes over time, with a brush: drag to choose a part, or move the two handles by the arrow keys. */

import { useSignal } from "@preact/signals";
import { useRef } from "preact/hooks";
import { binsOf, binWords, brushed, placeOf } from "./histogram";
import type { Histogram } from "./types";
import { count, moment } from "./words";

const HEIGHT = 56;

interface Props {
  histogram: Histogram;
  since: number | null;
  until: number | null;
  choose: (since: number | null, until: number | null) => void;
}

export function HistogramBrush({ histogram, since, until, choose }: Props) {
  const box = useRef<HTMLDivElement>(null);
  const drag = useSignal<[number, number] | null>(null);
  const over = useSignal(-1);
  const n = histogram.counts.length;
  const total = histogram.counts.reduce((sum, one) => sum + one, 0);
  if (!n || histogram.from === null || histogram.to === null) return null;

  const place = (event: PointerEvent) => {
    const { left, width } = box.current!.getBoundingClientRect();
    return Math.min(Math.max((event.clientX - left) / width, 0), 1);
  };
  const chosen: [number, number] = drag.value ?? [
    since === null ? 0 : placeOf(histogram, since),
    until === null ? 1 : placeOf(histogram, until),
  ];
  const [from, to] = chosen[0] < chosen[1] ? chosen : [chosen[1], chosen[0]];
  const set = (one: number, other: number) => {
    const found = brushed(histogram, one, other);
    choose(found?.since ?? null, found?.until ?? null);
  };
  const down = (event: PointerEvent) => {
    if (event.button !== 0 || (event.target as HTMLElement).closest("[role=slider]")) return;
    box.current!.setPointerCapture(event.pointerId);
    drag.value = [place(event), place(event)];
  };
  const move = (event: PointerEvent) => {
    over.value = Math.min(Math.floor(place(event) * n), n - 1);
    if (drag.value) drag.value = [drag.value[0], place(event)];
  };
  const up = () => {
    const span = drag.value;
    drag.value = null;
    if (span && Math.abs(span[0] - span[1]) > 0.004) set(...span);
  };
  const key = (side: 0 | 1) => (event: KeyboardEvent) => {
    const by = { ArrowLeft: -1, ArrowDown: -1, ArrowRight: 1, ArrowUp: 1, PageDown: -5, PageUp: 5, Home: -n, End: n }[event.key];
    if (event.key === "Escape") choose(null, null);
    else if (by === undefined) return;
    else {
      const places = [Math.round(from * n), Math.round(to * n)];
      const low = side === 0 ? 0 : places[0]! + 1;
      const high = side === 0 ? places[1]! - 1 : n;
      places[side] = Math.min(Math.max(places[side]! + by, low), high);
      set(places[0]! / n, places[1]! / n);
    }
    event.preventDefault();
  };
  const handle = (side: 0 | 1, at: number) => (
    <div
      class="brush-handle"
      role="slider"
      tabIndex={0}
      aria-label={side === 0 ? "Opened after" : "Opened before"}
      aria-valuemin={0}
      aria-valuemax={n}
      aria-valuenow={Math.round(at * n)}
      aria-valuetext={moment(histogram.from! + at * (histogram.to! - histogram.from!))}
      style={{ left: `${at * 100}%` }}
      onKeyDown={key(side)}
    />
  );
  const whole = from === 0 && to === 1;
  return (
    <section class="histogram" aria-label="Episodes over time">
      <div class="histogram-box" ref={box} onPointerDown={down} onPointerMove={move} onPointerUp={up} onPointerLeave={() => (over.value = -1)} onDblClick={() => choose(null, null)}>
        <svg viewBox={`0 0 1 ${HEIGHT}`} height={HEIGHT} preserveAspectRatio="none" role="img" aria-label={`${count(total, "episode")} over time`}>
          {binsOf(histogram).map((bin, i) => (
            <g key={i}>
              <rect class="h-rewarded" x={bin.x} width={bin.width * 0.9} y={HEIGHT * (1 - bin.rewarded)} height={HEIGHT * bin.rewarded} />
              <rect class="h-unrewarded" x={bin.x} width={bin.width * 0.9} y={HEIGHT * (1 - bin.rewarded - bin.unrewarded)} height={HEIGHT * bin.unrewarded} />
              <rect class="h-running" x={bin.x} width={bin.width * 0.9} y={HEIGHT * (1 - bin.rewarded - bin.unrewarded - bin.running)} height={HEIGHT * bin.running} />
            </g>
          ))}
        </svg>
        {!whole && <div class="brush-off" style={{ left: 0, width: `${from * 100}%` }} />}
        {!whole && <div class="brush-off" style={{ left: `${to * 100}%`, right: 0 }} />}
        {handle(0, from)}
        {handle(1, to)}
      </div>
      <p class="histogram-words">
        <span>{over.value >= 0 ? binWords(histogram, over.value) : `${moment(histogram.from)} to ${moment(histogram.to)}`}</span>
        <span class="key h-rewarded">rewarded</span>
        <span class="key h-unrewarded">closed without a reward</span>
        <span class="key h-running">running</span>
        {!whole && (
          <button type="button" onClick={() => choose(null, null)}>
            All times
          </button>
        )}
      </p>
    </section>
  );
}
