// Curves by uPlot: raw values faint, smoothed ones on top; a drag zooms all charts of a page, a double click shows all.

const COLOURS = ["#2f7ed8", "#e4743b", "#2ca25f", "#b055c9", "#d9b310", "#17a2b8", "#e0457b", "#7f7f7f"];
const SYNC = "steps";

export function colour(place) {
  return COLOURS[place % COLOURS.length];
}

// An exponential mean that is right from the first value on.
export function smooth(values, weight) {
  let mean = 0;
  let sum = 0;
  return values.map((value) => {
    if (value === null || value === undefined) return value;
    mean = weight * mean + (1 - weight) * value;
    sum = weight * sum + (1 - weight);
    return mean / sum;
  });
}

function css(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function axis(more) {
  return { stroke: css("--quiet"), grid: { stroke: css("--line"), width: 1 }, ticks: { stroke: css("--line"), width: 1 }, ...more };
}

function label(values) {
  const step = values.length > 1 ? Math.abs(values[1] - values[0]) : 1;
  return values.map((value) => {
    if (value === 0) return "0";
    if (Math.abs(value) >= 1e5 || Math.abs(value) < 1e-4) return value.toExponential(Math.abs(value) < 1e-4 ? 0 : 1);
    return String(Number(value.toFixed(Math.max(0, 1 - Math.floor(Math.log10(step))))));
  });
}

// series: [{ name, place, x: [...], y: [...] }], one a run. `zoom`: { min, max } or null; `zoomed` is told a new one.
export class Curve {
  constructor(element, { series, weight, zoom, zoomed, isTime, height = 190 }) {
    this.element = element;
    this.options = { zoomed, isTime, height };
    this.draw(series, weight, zoom);
  }

  draw(series, weight, zoom) {
    this.plot?.destroy();
    const joined = uPlot.join(series.map(({ x, y }) => [x, y]));
    const smoothed = weight > 0;
    const data = [joined[0]];
    const lines = [{}];
    series.forEach(({ name, place }, number) => {
      const [width, alpha] = smoothed ? [1, 0.25] : [1.6, 1];
      const few = series[number].x.length <= 60;
      const stroke = colour(place);
      const line = { label: name, stroke, width, alpha, spanGaps: true, points: { show: few && !smoothed, size: 4 } };
      data.push(joined[number + 1]);
      lines.push(line);
      if (smoothed) {
        data.push(smooth(joined[number + 1], weight));
        lines.push({ ...line, width: 2, alpha: 1 });
      }
    });
    const { isTime, height, zoomed } = this.options;
    this.plot = new uPlot(
      {
        width: this.element.clientWidth || 360,
        height,
        legend: { show: false },
        cursor: { sync: { key: SYNC }, drag: { x: true, y: false, setScale: false }, points: { size: 6 } },
        scales: { x: { time: isTime, ...(zoom ? { min: zoom.min, max: zoom.max, auto: false } : {}) } },
        axes: [axis({ size: 28 }), axis({ size: 54, values: (_, values) => label(values) })],
        series: lines,
        hooks: {
          setCursor: [(plot) => this.tell?.(plot, smoothed)],
          setSelect: [
            (plot) => {
              const { left, width } = plot.select;
              if (width < 4) return;
              zoomed({ min: plot.posToVal(left, "x"), max: plot.posToVal(left + width, "x") });
              plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
            },
          ],
        },
      },
      data,
      this.element,
    );
    this.plot.over.addEventListener("dblclick", () => zoomed(null));
  }

  resize() {
    if (this.element.clientWidth) this.plot.setSize({ width: this.element.clientWidth, height: this.options.height });
  }
}
