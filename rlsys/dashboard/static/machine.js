/** What every worker and node uses of its machine, over time: part of the view of the cluster. */

import { Chart } from "./charts.js";
import { Table } from "./components.js";
import { number, percent } from "./format.js";
import { html } from "./html.js";

const GIB = 2 ** 30;
const KINDS = [
  ["machine", "cpu", "Processors of workers"],
  ["machine", "memory", "Memory of workers"],
  ["machine", "gpu", "GPUs of workers"],
  ["machine", "gpu_memory", "GPU memory"],
  ["node", "cpu", "Processors of nodes"],
  ["node", "memory", "Memory of nodes"],
  ["node", "shm", "Shared memory of nodes (object store)"],
  ["node", "sent", "Sent by nodes"],
  ["node", "received", "Received by nodes"],
];

/** The charts of a MachineAnswer as props, and its rows; null if no worker was sampled. `begin_s`: of the run. */
export function machineOf({ workers, series }, begin_s) {
  if (!workers.length) return null;
  const charts = KINDS.map(([kind, name, title]) => {
    const found = series.filter(
      (one) => one.name.startsWith(`${kind}/`) && one.name.endsWith(`/${name}`),
    );
    const isBytes = found[0]?.unit.startsWith("bytes");
    const lines = found.map(({ name: full, times_s, values }) => ({
      label: full.slice(kind.length + 1, -name.length - 1),
      xs: times_s.map((time_s) => time_s - begin_s),
      ys: isBytes ? values.map((value) => (value === null ? null : value / GIB)) : values,
    }));
    const unit = isBytes ? found[0].unit.replace("bytes", "GiB") : found[0]?.unit;
    return { id: `${kind}-${name}`, title, unit, help: found[0]?.help, lines };
  });
  return { workers, charts: charts.filter(({ lines }) => lines.length) };
}

/** The section of the page. */
export function machineSection({ workers, charts }) {
  return html`<section key="machine" data-testid="machine"><h2>Machines</h2>
    <div class="charts">${charts.map((chart) => html`<${Chart} key=${chart.id} x="time" sync="machine" ...${chart} />`)}</div>
    <${Table} columns=${COLUMNS} rows=${workers} id="machines" keyOf=${({ worker }) => worker} /></section>`;
}

const gib = (bytes) => (bytes === null ? null : `${number(bytes / GIB)} GiB`);

const COLUMNS = [
  { label: "Worker", isHead: true, cell: ({ worker }) => worker },
  { label: "Node", cell: ({ host }) => host },
  { label: "Process", isNumber: true, cell: ({ pid }) => String(pid) },
  { label: "Busy cores", isNumber: true, cell: ({ cpu }) => (cpu === null ? null : number(cpu)) },
  { label: "Memory", isNumber: true, cell: ({ memory }) => gib(memory) },
  { label: "GPU", isNumber: true, cell: ({ gpu }) => (gpu === null ? null : percent(gpu)) },
  { label: "GPU memory", isNumber: true, cell: ({ gpu_memory }) => gib(gpu_memory) },
];
