// uPlot, wrapped: the one file that knows it. Lines over steps or time, bands, marks, a crosshair that charts share.
import { useEffect, useRef, useState } from "preact/hooks";
import uPlot from "uplot";
import { moment } from "../episodes/words";
import "uplot/dist/uPlot.min.css";

export interface Line {
  label: string;
  /** As many as `x`; null: nothing is known there. */
  values: readonly (number | null)[];
  /** A CSS variable of theme.css: "--series-1". */
  color: string;
  dashed?: boolean;
  /** Points alone, without lines between them. */
  points?: boolean;
}

export interface Mark {
  x: number;
  label: string;
}

export interface ChartProps {
  label: string;
  x: readonly number[];
  lines: readonly Line[];
  marks?: readonly Mark[];
  /** A range of y in which all is well. */
  band?: readonly [number, number];
  /** The name of x, where it is not time: "step". */
  xLabel?: string;
  /** Seconds since 1970 instead of numbers. */
  time?: boolean;
  height?: number;
  /** Logarithmic y. */
  log?: boolean;
  /** Charts with the same name show the same x under the pointer. */
  sync?: string;
  format?: (value: number) => string;
  /** Called with the brushed range; null: the brush was lifted by a double click. */
  brushed?: (range: [number, number] | null) => void;
}

const color = (name: string) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/** A number in few characters: 0.00012, 1.25, 12k. */
export function short(value: number | null | undefined): string {
  if (value == null || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1e6) return `${+(value / 1e6).toPrecision(3)}M`;
  if (size >= 1e4) return `${+(value / 1e3).toPrecision(3)}k`;
  if (size !== 0 && size < 1e-4) return value.toExponential(1);
  return String(+value.toPrecision(size >= 100 ? 4 : 3));
}

/** The wells of a dark page need other colors than those of a light one: counts each change. */
function useScheme(): number {
  const [count, add] = useState(0);
  useEffect(() => {
    const query = matchMedia("(prefers-color-scheme: dark)");
    const changed = () => add((n) => n + 1);
    query.addEventListener("change", changed);
    return () => query.removeEventListener("change", changed);
  }, []);
  return count;
}

function drawn(props: ChartProps): uPlot.Plugin {
  return {
    hooks: {
      drawClear: (plot) => {
        if (!props.band) return;
        const [low, high] = props.band.map((y) => plot.valToPos(y, "y", true)) as [number, number];
        const { left, top, width, height } = plot.bbox;
        const from = Math.max(top, Math.min(high, low));
        const to = Math.min(top + height, Math.max(high, low));
        plot.ctx.fillStyle = color("--band");
        if (to > from) plot.ctx.fillRect(left, from, width, to - from);
      },
      draw: (plot) => {
        const { ctx, bbox } = plot;
        const floor = bbox.top + bbox.height;
        ctx.fillStyle = color("--accent");
        let before = -Infinity;
        for (const mark of props.marks ?? []) {
          const x = Math.round(plot.valToPos(mark.x, "x", true));
          // Closer ticks would be a bar.
          if (x < bbox.left || x > bbox.left + bbox.width || x - before < 4 * devicePixelRatio) continue;
          before = x;
          ctx.fillRect(x - devicePixelRatio / 2, floor + 1, devicePixelRatio, 5 * devicePixelRatio);
        }
      },
    },
  };
}

/** Steps and versions are whole numbers. */
const WHOLE = [1, 2, 5].flatMap((one) => Array.from({ length: 8 }, (_, power) => one * 10 ** power)).sort((a, b) => a - b);

/** The range of y for values in this range. uPlot shows 0 to 100 where all are 0, which is 10,000 % of a share. */
export function rangeOf(low: number | null, high: number | null): uPlot.Range.MinMax {
  if (low === null || high === null) return [null, null];
  return low === 0 && high === 0 ? [0, 1] : uPlot.rangeNum(low, high, 0.1, true);
}

/** A line of one or two values is hard to see without points, and one value has no line. */
const isShort = (plot: uPlot, line: number) => Array.from<number | null | undefined>(plot.data[line]!).filter((value) => value != null).length < 3;

/** Labels of an axis: no two are the same. Numbers get the digits for that; of others, the first of equal ones stands. */
export function tickLabels(ticks: readonly (number | null)[], format: (value: number) => string): string[] {
  const labels = ticks.map((tick) => (tick === null ? "" : format(tick)));
  const given = labels.filter(Boolean);
  if (new Set(given).size === given.length) return labels;
  if (format === short) return ticks.map((tick) => (tick === null ? "" : String(+tick.toPrecision(9))));
  return labels.map((label, i) => (labels.indexOf(label) === i ? label : ""));
}

const plain = (value: number) => String(+value.toPrecision(6));

function options(props: ChartProps, width: number): uPlot.Options {
  const format = props.format ?? short;
  const axis = { stroke: color("--quiet"), grid: { stroke: color("--grid"), width: 1 }, ticks: { stroke: color("--grid"), size: 4 }, font: "11px system-ui" };
  return {
    width,
    height: props.height ?? 150,
    padding: [8, 8, 0, 0],
    cursor: {
      points: { size: 6 },
      drag: { x: true, y: false, setScale: !props.brushed },
      ...(props.sync ? { sync: { key: props.sync, setSeries: false } } : {}),
    },
    legend: { show: true, live: true },
    scales: { x: { time: props.time ?? false }, y: props.log ? { distr: 3 } : { range: (_plot, low, high) => rangeOf(low, high) } },
    axes: [
      { ...axis, size: 24, gap: props.marks?.length ? 5 : 3, ...(props.time ? {} : { incrs: WHOLE }) },
      { ...axis, size: 48, gap: 3, values: (_plot, ticks) => tickLabels(ticks, format) },
    ],
    series: [
      { label: props.time ? "time" : (props.xLabel ?? "step"), value: (_plot: uPlot, value: number | null) => (value === null ? "–" : props.time ? moment(value) : plain(value)) },
      ...props.lines.map((line) => ({
        label: line.label,
        stroke: color(line.color),
        width: 1.5,
        spanGaps: true,
        ...(line.dashed ? { dash: [5, 4] } : {}),
        ...(line.points ? { paths: () => null } : {}),
        points: line.points ? { show: true, size: 9, fill: color(line.color) } : { show: isShort, size: 5 },
        value: (_plot: uPlot, value: number | null) => (value === null ? "–" : format(value)),
      })),
    ],
    plugins: [drawn(props)],
    hooks: {
      // Without a pointer in the chart, its legend has the newest figures.
      setCursor: [(plot) => plot.cursor.idx == null && plot.setLegend({ idx: plot.data[0].length - 1 })],
      setData: [(plot) => plot.cursor.idx == null && plot.setLegend({ idx: plot.data[0].length - 1 })],
      ready: [(plot) => plot.setLegend({ idx: plot.data[0].length - 1 })],
      setSelect: [
        (plot) => {
          if (!props.brushed || plot.select.width < 2) return;
          const { left, width: wide } = plot.select;
          props.brushed([plot.posToVal(left, "x"), plot.posToVal(left + wide, "x")]);
        },
      ],
    },
  };
}

/** The last figures in words, for those who cannot see the drawing. */
function summary({ label, lines, format = short }: ChartProps): string {
  const ends = lines.map((line) => {
    const last = line.values.findLast((value) => value !== null);
    return `${line.label} ${last == null ? "without figures" : `now ${format(last)}`}`;
  });
  return `${label}: ${ends.join(", ")}`;
}

export function Chart(props: ChartProps) {
  const box = useRef<HTMLDivElement>(null);
  const plot = useRef<uPlot | null>(null);
  const scheme = useScheme();
  const shape = [scheme, props.sync, props.log, props.time, props.band?.join(), props.marks?.length, ...props.lines.map((line) => line.label + line.color)].join("|");
  const data = () => [props.x, ...props.lines.map((line) => line.values)] as unknown as uPlot.AlignedData;
  useEffect(() => {
    const element = box.current!;
    const made = new uPlot(options(props, element.clientWidth || 300), data(), element);
    plot.current = made;
    const fit = new ResizeObserver(() => made.setSize({ width: element.clientWidth, height: props.height ?? 150 }));
    fit.observe(element);
    const lifted = () => props.brushed?.(null);
    made.over.addEventListener("dblclick", lifted);
    return () => {
      fit.disconnect();
      made.destroy();
      plot.current = null;
    };
  }, [shape]);
  useEffect(() => plot.current?.setData(data()), [props.x, props.lines, shape]);
  return <div class="chart" role="img" aria-label={summary(props)} ref={box} />;
}
